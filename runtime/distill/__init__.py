"""Distillation: an EAGLE-3 drafter is trained for a target, from the target's own features and logits."""
