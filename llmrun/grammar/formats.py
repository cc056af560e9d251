"""The formats of strings that are enforced, as patterns: RFC 3339 dates and times, RFC 5321 addresses, RFC 3986 URIs,
RFC 9562 UUIDs. They are somewhat stricter: no leap second, no year 0."""

from __future__ import annotations

_LOWER = "a-zA-Z0-9"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "(?:" + "|".join([
    f"(?:{_H16}:){{7}}{_H16}",
    *(f"(?:{_H16}(?::{_H16}){{0,{n}}})?::(?:{_H16}(?::{_H16}){{0,{5 - n}}})?" for n in range(6)),
]) + ")"  # fmt: skip
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    f"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT = "[0-9]{1,9}"
_CLOCK = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = f"[{_LOWER}](?:[{_LOWER}-]{{0,61}}[{_LOWER}])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_PCHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_AUTHORITY = (
    r"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*@)?"
    rf"(?:\[{_IPV6}\]|(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{{2}})*)(?::[0-9]{{0,5}})?"
)
FORMATS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_COUNT}W)",
        "email": f"{_ATOM}(?:\\.{_ATOM})*@(?:{_HOSTNAME}|\\[{_IPV4}\\])",
        "hostname": _HOSTNAME,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": (
            f"[a-zA-Z][a-zA-Z0-9+\\-.]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
            f"|{_PCHAR}+(?:/{_PCHAR}*)*)?(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
        ),
        "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    }.items()
}  # fmt: skip
