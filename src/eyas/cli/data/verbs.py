"""Make training data: chats, answers, hidden states."""

from eyas.cli.data.capture import capture
from eyas.cli.data.prepare import prepare
from eyas.cli.data.regenerate import regenerate
from eyas.cli.data.synthesize import synthesize

VERBS = {"synthesize": synthesize, "prepare": prepare, "regenerate": regenerate, "capture": capture}
