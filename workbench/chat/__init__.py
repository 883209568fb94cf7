"""The conversation, its token loop, and the handoff from one model to the other."""
