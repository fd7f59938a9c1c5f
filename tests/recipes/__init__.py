"""Which of the recipes of NVIDIA's Megatron-Bridge the product can hand over."""
