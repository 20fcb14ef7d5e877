"""Long-context evaluation of a model under several positional encodings: `python -m eval --help`.

Every part is importable without the command line: `eval.perplexity.perplexity(model, ids, ...)`,
`eval.gain.gain(model, ids, ...)`, `eval.passkey.passkey(model, tokenizer, ...)`,
`eval.needle.needle(model, tokenizer, ...)`, `eval.likelihood.token_losses(model, ids)`, `eval.data.documents(source)`,
`eval.scores.effective_length(scores, rule)`, `eval.metric.PasskeyScore()` for `evaluate`.
"""
