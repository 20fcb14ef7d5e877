"""Long-context evaluation of a model under several positional encodings: `python -m eval --help`.

Every part is importable without the command line: `eval.perplexity.perplexity(model, ids, ...)`,
`eval.passkey.passkey(model, tokenizer, ...)`, `eval.likelihood.token_losses(model, ids)`, `eval.data.text(name)`,
`eval.data.documents(source)`, `eval.scores.effective_length(scores, rule)`,
`eval.metric.PasskeyScore()` for `evaluate`.
"""
