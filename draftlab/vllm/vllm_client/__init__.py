"""The client program: runs an installed vLLM on token ids and reports tokens, counters and times.

`vllm/process.py` starts a copy of this folder with the interpreter that has vLLM, so it imports
nothing of draftlab or of draftlab's environment. It exchanges JSON objects, one a line. The first
line of standard input is the setup, which is answered when the engine is loaded. Every further line
is a request, answered when its prompts are decoded. The end of the input ends the program. Answers
go to the original standard output; what vLLM itself prints goes to standard error.

Setup (unknown keys are refused)::

    target               folder of the target model (required)
    draft                folder of the head, speculators or native format; null: no drafting
    method               "eagle3" (default) or another method of vLLM, which would otherwise guess
    k                    drafted tokens per step
    draft_probs          whether drafts are sampled and verified with the head's probabilities
    parallel_drafting    true for P-EAGLE heads
    dtype                "float32" (default), "bfloat16", …
    max_model_len        maximum number of positions of a request
    max_num_seqs         batch size; 1: one request after the other
    boundaries           null, or layers in ascending order (num_layers: the state before the final
                         norm), whose inputs are written instead of decoding
    states_folder        folder of those states, a safetensors file per prompt
    speculative_extra, engine_extra   more options of vLLM's speculative_config and LLM()

Request: prompts (lists of token ids) and sampling (null, or for each prompt an object with
temperature, top_k, top_p, seed, max_new_tokens and stop_token_ids, which are all that ends an
answer because vLLM knows no eos here). With boundaries the request has prompts only
(`hidden_states.py` says what is answered).

Counters are vLLM's own. The counters of `LLM.get_metrics()` and those of the requests must agree,
or the program fails. A vLLM without counters per request decodes prompt by prompt (max_num_seqs 1).
"""
