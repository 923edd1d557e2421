"""What looks the same should be translated the same: `plain_text`."""

import re

INVISIBLE = re.compile(  # Unicode's default-ignorable letters, and control characters
    "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
BLANK = re.compile(r"[\s\u2800]")
LOOKALIKES = str.maketrans(  # hyphens, dashes, apostrophes, a low quotation mark, a capital
    "\u2010\u2011\u2012\u2212\u02bc\xb4\u2032\u201a\u1e9e", "--––’’’,ß"
)


def plain_text(text: str) -> str:
    """`text` without what can't be seen, with plain spaces and the commoner of two lookalikes."""
    return BLANK.sub(" ", INVISIBLE.sub("", text)).translate(LOOKALIKES)
