"""Long-context evaluation of a model under several positional encodings: `python -m eval --help`.

Every part is importable without the command line: `eval.perplexity.perplexity(model, ids, ...)`,
`eval.gain.gain(model, ids, ...)`, `eval.passkey.passkey(model, tokenizer, ...)`,
`eval.needle.needle(model, tokenizer, ...)`, `eval.likelihood.token_losses(model, ids)`, `eval.data.documents(source)`,
`eval.ruler.ruler(model, tokenizer, tasks, lengths)`, `eval.harness.as_lm(model, tokenizer)` for lm-evaluation-harness,
`eval.scores.effective_length(scores, rule)`, `eval.scores.paired_bootstrap(mine, base)`,
`eval.metric.PasskeyScore()` for `evaluate`. `eval.commands` has a `run` of every command.
"""
