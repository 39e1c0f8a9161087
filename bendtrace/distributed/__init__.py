"""Models on several processes: DDP, FSDP2, DTensor."""
