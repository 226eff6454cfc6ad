"""``octavo simulate``: the scheduler on a virtual clock, without a model."""
