"""From prompts to a store of hidden states: conversations, answers, records, draft vocabulary."""
