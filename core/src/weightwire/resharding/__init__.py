"""From M ranks that hold shards to N ranks that load regions: who sends what, and both sides of carrying it out.

For transports that move regions instead of whole tensors. Needs numpy, which they require; nothing else here does.
"""
