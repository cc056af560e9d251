"""The seam to whatever computes logits."""
