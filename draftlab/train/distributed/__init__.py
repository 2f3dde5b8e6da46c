"""Training in several processes: DDP, FSDP2 and ZeRO."""
