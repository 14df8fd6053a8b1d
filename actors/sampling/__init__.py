"""From logits to the distribution that tokens are drawn from: processors, penalties, filters, samplers."""
