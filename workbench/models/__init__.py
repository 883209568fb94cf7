"""Where weights come from: named pairs, the embedded family, loading, and the two models of a pair."""
