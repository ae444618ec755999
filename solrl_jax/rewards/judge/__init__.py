"""The reward `judge`: a vision-language model behind an OpenAI-compatible endpoint.

settings.py     the options of a judge, and their checks
templates.py    the questions of the package, and those of users
scoring.py      from an answer to a score, one function with its formula each
client.py       requests: concurrency, timeouts, retries, limits, the API key
cache.py        scores on disk, by the content of the request
reward.py       the functions that worker processes call
probe.py        what an endpoint supports, for `solrl doctor`
"""
