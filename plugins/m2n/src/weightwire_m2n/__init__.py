"""Backend `nccl_m2n`: from M trainer ranks to N worker ranks, each byte crossing once."""
