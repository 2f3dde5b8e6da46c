"""From conversations to token ids: chat templates, answers, suites, the draft vocabulary."""
