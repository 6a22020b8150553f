"""The replay of suffix drafts counts what it says it counts.  Needs no tokenizer."""

from __future__ import annotations

import json
import random
import subprocess

from tests.bench.bench_suffix import git, read, replay, table


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_each_output_token_is_counted_once_and_a_copy_comes_in_full_drafts(tmp_path, capsys):
    draw = random.Random(1)
    text = [draw.randrange(9000) for _ in range(300)]
    rows = [{"kind": "copy", "prompt": text, "output": text[:-1]},
            {"kind": "new", "prompt": [1], "output": text},
            {"kind": "copy", "prompt": [*text, 9000, 9001], "output": [9000, 9001, *text]}]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = list(read(tmp_path, encode))
    figures = replay(items, 4)
    assert figures["all"].tokens == sum(len(item.output) for item in items)
    assert figures["new"].steps == 300
    assert 4.5 < figures["copy"].tau <= 5
    assert figures["copy"].reached[0] >= figures["copy"].right[0] >= figures["copy"].right[3]
    table({4: figures})
    assert "limit 4  copy" in capsys.readouterr().out


def test_a_prompt_that_goes_on_has_the_ids_of_the_turn_before(tmp_path):
    rows = [{"session": "s", "prompt": "ab", "output": "cd"},
            {"session": "s", "prompt": "abcdef", "output": "g", "predicted": "hi"}]
    file = tmp_path / "turns.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    calls = []
    first, second = read(file, lambda text: calls.append(text) or encode(text))
    assert "ef" in calls
    assert second.prompt[:4] == first.prompt + first.output
    assert second.predicted == encode("hi")


def test_commits_become_calls_that_edit_and_files_with_their_prediction(tmp_path):
    def run(*words: str) -> None:
        name = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True,
                       capture_output=True)

    run("init")
    lines = [f"line {n} of the file\n" for n in range(30)]
    for version in ("old", "new"):
        (tmp_path / "a.py").write_text("".join([*lines[:10], version + "\n", *lines[10:]]))
        run("add", ".")
        run("commit", "-m", version)
    rows = list(git(tmp_path, 1))
    assert [row["kind"] for row in rows] == ["agent", "agent", "rewrite", "predict"]
    assert '"new": "line 9 of the file\\nnew\\n"' in rows[1]["output"]
    assert rows[1]["prompt"].startswith(rows[0]["prompt"] + rows[0]["output"])
    assert "\nold\n" in rows[3]["predicted"]
    assert "\nnew\n" in rows[3]["output"]
