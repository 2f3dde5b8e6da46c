"""Runs an installed vLLM on token ids and reports tokens, counters and times.

`vllm/engine.py` starts a copy of this folder with the interpreter that has vLLM, so it imports
nothing of draftlab and nothing of draftlab's environment. It talks in JSON, one object a line: the
setup comes first on standard input and is answered when the engine is ready; every further line
asks for some prompts and is answered when they are decoded; the end of the input ends the program.
Answers go to what was standard output; whatever vLLM prints goes to standard error.

Setup (unknown keys are refused)::

    target               folder of the target model (required)
    draft                folder of the head, speculators or native format; null: no drafting
    method               "eagle3" (default) or another of vLLM's, which would otherwise guess it
    k                    drafted tokens a step
    draft_probs          whether drafts are sampled and verified with the head's probabilities
    parallel_drafting    true for P-EAGLE heads
    dtype                "float32" (default), "bfloat16", …
    max_model_len        positions a request may take
    max_num_seqs         requests that share a batch; 1: one after the other
    boundaries           null, or ascending layers (and their number, for the state before the final
                         norm): it writes their inputs instead of decoding
    states_folder        where those go, a safetensors file a prompt
    speculative_extra, engine_extra   more options of vLLM's speculative_config and LLM()

Ask: prompts (lists of token ids), temperature, top_k, top_p, seed (prompt i is sampled with
seed + i), max_new_tokens, stop_token_ids (all that ends an answer: vLLM knows no eos here), and
each: null, or for each prompt a temperature, seed (as it stands) or max_new_tokens of its own. Of
states: prompts alone (`states.py` says what is answered).

Counters are vLLM's own. Those of `LLM.get_metrics()` and those of the requests must agree, or this
program fails; a vLLM without counters a request gives them prompt by prompt (max_num_seqs 1).
"""
