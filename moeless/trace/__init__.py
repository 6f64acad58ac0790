"""Routing traces: what experts tokens were sent to, from this engine or another one, on disk and in memory.

Two kinds: `Routes` keeps every token's expert ids, so batches can be composed anew; `LoadTrace` keeps how many tokens
each expert got in each iteration as it ran. `formats.read_trace` reads either from any known file.
"""
