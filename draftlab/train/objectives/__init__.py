"""The training objectives and the loss they share."""
