"""Text: prompts, chat templates, loss masks, answers, suites, and the draft vocabulary."""
