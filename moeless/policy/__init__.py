"""Decisions: how many replicas, where, and which tokens go to which. Plain data and numpy; no torch, clock or I/O.

`balancers` is the interface, `config` the methods as data. Plans come from `scaler` and `placer` (the paper's), `eplb`
(DeepSeek's) or `two_speed` (ours, on `seeds`, `portfolio` and `improve`). Tokens are divided by `split`, `flow` (exact)
or `roofline`, and dealt to source ranks by `deal`. `cost` prices, `budget` shares slots over layers.
"""
