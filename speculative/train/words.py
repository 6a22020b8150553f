"""Seed words for made-up prompts: topics, people, things and their fields.  Composes nothing."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


TOPICS = _split("""
gravity, photosynthesis, inflation, the water cycle, volcanoes, black holes, bread baking, chess,
the violin, sleep, honey bees, coral reefs, jazz, the printing press, compound interest, electric
cars, vaccines, tides, democracy, supply and demand, recycling, meditation, the immune system,
bicycles, tea, coffee, chocolate, glaciers, earthquakes, rainbows, the moon, Mars, comets, the
internet, databases, hash tables, binary search, recursion, sorting, operating systems, compilers,
encryption, passwords, neural networks, statistics, probability, prime numbers, fractions, algebra,
triangles, calculus, the Roman Empire, ancient Egypt, the Silk Road, the Renaissance, trade unions,
the steam engine, lighthouses, sailing, windmills, solar panels, nuclear power, batteries, magnets,
lightning, sound waves, mirrors, telescopes, microscopes, cells, DNA, evolution, dinosaurs, whales,
penguins, owls, wolves, cats, dogs, horses, spiders, mushrooms, oak trees, roses, wheat, rice,
soil, composting, gardening, cooking rice, soup, salads, yoga, running, swimming, football, tennis,
climbing, camping, maps, travelling by train, airports, budgets, taxes, saving money, insurance,
job interviews, writing emails, public speaking, time management, teamwork, leadership, friendship,
learning languages, poetry, novels, theatre, painting, photography, film, pottery, knitting, clocks,
bridges, skyscrapers, concrete, glass, steel, paper, plastics, water filters, rivers, deserts,
rainforests, the Arctic, islands, cities, villages, libraries, museums, schools, hospitals, farms,
shops, markets, software testing, version control, code review, spreadsheets, search engines,
robots, drones, satellites, GPS, radio, telephones, cameras, 3D printing, video games, board games,
puzzles, dreams, memory, habits, stress, exercise, nutrition, vitamins, the heart, the lungs, teeth
""")
AUDIENCES = _split("""
a child, a teenager, a beginner, a student, a colleague, a manager, an engineer, a nurse, a farmer,
my grandmother, a busy reader, a new employee, a customer, a curious friend, an expert
""")
FORMS = _split("""
short poem, story, paragraph, list of five facts, summary, dialogue, letter, diary entry, recipe,
speech, blog post, product description, newsletter, song, limerick, quiz, checklist, FAQ, headline,
table with three columns, press release, tweet, plan for a week, lesson plan, step by step guide
""")
TONES = _split("""
friendly, formal, funny, calm, excited, serious, simple, poetic, direct, polite, warm, dry
""")
QUALITIES = _split("""
cost, safety, history, beauty, difficulty, speed, usefulness, risks, benefits, science, future,
environmental impact, popularity, main ideas, common mistakes
""")
TASKS = _split("""
reverses a string, counts the vowels of a word, finds the largest number of a list, merges two
sorted lists, checks whether a number is prime, computes the n-th Fibonacci number, removes
duplicates from a list, counts the words of a text, sorts a list of dictionaries by a key, reads a
CSV file, validates an email address, converts Celsius to Fahrenheit, flattens a nested list, finds
common elements of two lists, computes a factorial, checks whether a word is a palindrome, computes
the mean and the median, rounds numbers to two decimals, parses a date, groups words by their first
letter, counts letters with a dictionary, transposes a matrix, finds the shortest word, draws a
triangle of stars, downloads a web page, writes a list to a JSON file, splits a list into chunks
""")
LANGUAGES = _split("Python, JavaScript, SQL, Java, C, Rust, Go, TypeScript, Bash, HTML")
NAMES = _split("""
Anna, Ben, Carla, David, Elena, Farid, Grace, Hiro, Ines, Jonas, Kavya, Liam, Mina, Noah, Olga,
Pedro, Quinn, Rosa, Sam, Tara, Umar, Vera, Wei, Xenia, Yusuf, Zoe
""")
SURNAMES = _split("""
Adler, Brown, Costa, Diaz, Evans, Fischer, Garcia, Hansen, Ito, Jensen, Khan, Lopez, Meyer, Novak,
Okafor, Patel, Rossi, Silva, Tanaka, Weber, Young, Zhang
""")
CITIES = _split("""
Berlin, Paris, Lagos, Tokyo, Lima, Oslo, Cairo, Delhi, Boston, Madrid, Rome, Vienna, Sydney,
Nairobi, Toronto, Seoul, Porto, Athens, Dublin, Prague, Helsinki, Denver, Austin, Quito, Hanoi
""")
WORDS = _split("""
blue, small, final, draft, north, spare, urgent, daily, green, old, new, shared, main, silver,
summer, winter, quick, open, private, late, second, large, central, weekly
""")

#: What tools work on: a thing and its fields, each "name:kind" (kinds: see tools.py).
THINGS: dict[str, str] = {
    "invoice": "invoice_id:code customer:person amount:money due_date:date status:state paid:flag",
    "order": "order_id:code item:label quantity:count city:city express:flag status:state",
    "ticket": "ticket_id:code title:sentence priority:level assignee:person labels:labels",
    "event": "title:label date:date start_time:time duration_minutes:count location:city",
    "flight": "origin:city destination:city departure_date:date passengers:count cabin:cabin",
    "hotel": "city:city check_in:date nights:count guests:count max_price:money breakfast:flag",
    "file": "path:path content:sentence encoding:encoding overwrite:flag size_bytes:count",
    "message": "to:email subject:label body:sentence urgent:flag cc:emails",
    "contact": "name:person email:email phone:phone company:label favourite:flag",
    "product": "sku:code name:label price:money currency:currency stock:count tags:labels",
    "weather": "city:city units:units days:count hourly:flag",
    "route": "start:city end:city mode:mode avoid_tolls:flag departure_time:time",
    "payment": "account:code amount:money currency:currency recipient:person note:sentence",
    "task": "title:sentence due_date:date priority:level owner:person done:flag tags:labels",
    "server": "hostname:host region:region cpu_count:count memory_gb:count running:flag",
    "log": "service:host level:severity since:date limit:count query:label",
    "database": "table:label columns:labels limit:count order_by:label descending:flag",
    "document": "title:label author:person language:language page_count:count published:date",
    "song": "title:label artist:person genre:genre year:year duration_seconds:count",
    "recipe": "dish:label servings:count vegetarian:flag ingredients:labels minutes:count",
    "patient": "patient_id:code name:person birth_date:date ward:label allergies:labels",
    "booking": "booking_id:code name:person date:date time:time party_size:count",
    "package": "tracking_number:code carrier:carrier weight_kg:money destination:city",
    "sensor": "sensor_id:code location:position unit:units value:money active:flag",
    "account": "username:host email:email role:role active:flag created:date",
    "stock": "symbol:symbol exchange:label price:money volume:count date:date",
    "branch": "repository:host name:label base:label protected:flag commits:count",
    "deployment": "service:host version:version environment:stage replicas:count",
    "survey": "title:label questions:labels anonymous:flag closes:date responses:count",
    "room": "building:label floor:count capacity:count projector:flag date:date",
}
VERBS = _split("""
get, list, create, update, delete, search, count, archive, share, export, check, find
""")
CHOICES: dict[str, tuple[str, ...]] = {
    "state": ("open", "pending", "paid", "closed", "cancelled"),
    "level": ("low", "medium", "high"),
    "cabin": ("economy", "premium", "business"),
    "encoding": ("utf-8", "latin-1", "ascii"),
    "currency": ("EUR", "USD", "GBP", "JPY"),
    "units": ("metric", "imperial"),
    "mode": ("driving", "walking", "cycling", "transit"),
    "region": ("eu-west", "us-east", "us-west", "ap-south"),
    "severity": ("debug", "info", "warning", "error"),
    "language": ("en", "de", "fr", "es", "ja"),
    "genre": ("jazz", "rock", "folk", "classical"),
    "carrier": ("DHL", "UPS", "FedEx", "GLS"),
    "role": ("admin", "editor", "viewer"),
    "stage": ("test", "staging", "production"),
}
