"""KV Handoff Workbench: change models in mid-conversation, and measure what that costs.

Imports go downwards only: `ui` -> `lab`, `chat` -> `models`, `kv`.
"""
