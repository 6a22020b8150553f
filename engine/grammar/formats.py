"""What llguidance's `format`s let through, narrowed.  Knows no schema, runs no pattern.

llguidance 1.9.1 takes 29 February of any year, the second 60 of any minute, and host names of any
length.  What is put beside the format leaves the values that calendars have; of leap seconds only
those written in UTC.  Labels that begin with `xn--` are held to a host name's letters, no more.
"""

from __future__ import annotations

_LEAP = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # no year 0: few can read it
_DAY = f"(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP})"
_SECOND = "(?:[0-9]{2}:[0-9]{2}:[0-5]|23:59:60(?:[.][0-9]+)?(?:[zZ]|[+-]00:00)$)"

#: format -> keywords that hold beside it; a pattern is unanchored where it does not say `^`.
NARROWED: dict[str, dict[str, object]] = {
    "date": {"pattern": f"^{_DAY}"},
    "time": {"pattern": f"^{_SECOND}"},
    "date-time": {"pattern": f"^{_DAY}[^tT ]*[tT ]{_SECOND}"},
    "hostname": {"maxLength": 253},
}
