"""Parameters divided over ranks by FSDP2."""
