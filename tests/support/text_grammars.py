"""Codex's grammar of patches, and a regular expression of the same texts."""

from __future__ import annotations

import re

APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = re.compile(
    r"\*\*\* Begin Patch\n("
    r"\*\*\* Add File: .+\n(\+.*\n)+|\*\*\* Delete File: .+\n|"
    r"\*\*\* Update File: .+\n(\*\*\* Move to: .+\n)?((@@( .+)?\n|[-+ ].*\n)+(\*\*\* End of File\n)?)?"
    r")+\*\*\* End Patch\n?"
)
