"""The client program: runs an installed vLLM on token ids and reports tokens, counters and times.

`servers/vllm_process.py` starts a copy of this folder with the interpreter that has vLLM, so it
imports nothing of draftlab or of draftlab's environment. It exchanges JSON objects, one a line. The
first line of standard input is the setup, which is answered when the engine is loaded. Every
further line is a request, answered when its prompts are decoded. The end of the input ends the
program. Answers go to the original standard output; what vLLM itself prints goes to standard error.

`loading.SETUP` explains the keys of a setup.

Request: prompts (lists of token ids) and sampling (for each prompt an object with temperature,
max_new_tokens and stop_token_ids, which are all that ends an answer because vLLM knows no eos here,
and perhaps top_k, top_p and seed). With boundaries the request has prompts only
(`hidden_states.py` says what is answered).

Counters are vLLM's own. The counters of `LLM.get_metrics()` and those of the requests must agree,
or the program fails. A vLLM without counters per request decodes prompt by prompt (max_num_seqs 1).
"""
