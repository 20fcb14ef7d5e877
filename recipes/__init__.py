"""Fine-tuning recipes: `accelerate launch recipes/finetune.py --config recipes/configs/NAME.yaml`."""
