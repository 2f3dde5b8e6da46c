"""From conversations to the token ids a target sees, and which of them it wrote itself."""
