"""`llmrun help`: the help of a command, and topics that belong to no single one."""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.cli.commands import ALIASES, COMMANDS
from llmrun.cli.completion import complete_words
from llmrun.errors import UsageError
from llmrun.ui.terminal.output import Output

EXIT_CODES = {
    0: "ok",
    1: "internal error: a bug in llmrun",
    2: "usage: an invalid argument or option",
    3: "model not found",
    4: "the hub wants a login, or its terms accepted",
    5: "network trouble, or the bytes that arrived are wrong",
    6: "not enough memory or disk",
    7: "bad model file, chat template or grammar",
    8: "the engine crashed",
    9: "a limit cut off an answer that has to follow a grammar or JSON schema",
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM, or because the terminal was closed",
}

TOOLS = """\
llmrun chat MODEL --tools FILE.py          the functions of a Python file
llmrun chat MODEL --tools "mcp:COMMAND"    the tools of an MCP server, which
                                           COMMAND starts; for this,
                                           pip install 'llmrun[mcp]'

The model may call every public function that the file defines. Type hints
say what it takes, the docstring what it is for:

    from datetime import datetime
    from zoneinfo import ZoneInfo

    def what_time(zone: str) -> str:
        \"\"\"Tells the time in a place.

        Args:
            zone: such as Europe/Rome
        \"\"\"
        return datetime.now(ZoneInfo(zone)).isoformat()

Before a call runs, it is shown with its arguments and asked for: y runs it,
a runs this tool without asking from now on, n refuses it, which the model is
told. Ctrl-C ends a call that runs; at the question it ends the turn.

    --yes-to NAME           this tool runs without asking; may be repeated.
                            In a pipe no other runs.
    --tool-timeout SECONDS  how long a call may take: 60 by default. Results
                            are cut off after 10,000 characters.
    /tools                  in a chat: what there is

Functions and servers run in processes of their own, as you, with all that you
may do. They end with the chat."""

SPECULATION = """\
Speculation: more than one token a decode step, and exactly the same choice.

To choose a token, a model reads all of its weights. Reading them takes most of
the time, and while they are read several tokens can be checked at hardly more
cost.

  draft       Tokens are guessed: where the end of the text so far occurred
              before, in the prompt or in the answer, what came next then may
              come next now. That costs microseconds.
  verify      One decode step computes what would follow each of them. The
              sampler then chooses token by token, as always: while it chooses
              what was drafted, the next choice is there already. The first
              other choice is taken instead, and what was drafted behind it is
              dropped from the KV cache.
  acceptance  The share of drafted tokens that the sampler chose, too. Editing,
  rate        summarising, quoting and reformatting repeat much of the prompt,
              and most drafts are accepted; of free text, hardly any.

Why nothing changes in the answer: every token is chosen by the sampler from
the model's logits, with the same penalties, grammar, bans and random numbers
as without drafts. Only rounding may differ: the rows of a wide step may be
added up in another order than a single one, which can decide between two
tokens that are equally likely.

When it does not pay: a step of 4, 8 or 16 rows takes longer than one of a
single row, on some machines so much that drafts lose. So the times are
measured, once for each machine, model and build: by `chat` while you read the
first long answer, by `serve` while nobody asks, and by `llmrun tune` and
`llmrun bench MODEL --speculate`, which also measure again.

  --speculate auto   Draft where these times and the acceptance so far say that
                     it pays; the default. Without measured times it is off, as
                     it is for mixtures of experts, where each row wakes
                     experts of its own, and for recurrent models, whose state
                     can't be taken back.
  --speculate off    Draft nothing.
  --speculate N      Always draft up to N tokens a step, 3 to 15.
  --draft MODEL      Where the text says too little, a smaller model guesses,
                     in its own context: those tokens that it finds at least
                     75 % likely. It has to have the same vocabulary, as those
                     of one family do. It reads a prompt once the answer is so
                     long that it will pay, and its steps count: where it is
                     not much faster than the other model, nothing is drafted.
                     `llmrun plan MODEL --draft SMALLER` says what both take,
                     `llmrun bench MODEL --draft SMALLER --speculate` what
                     that gains.

MTP heads, which some models have for drafting, are not used: llama-cpp-python
reaches them only through C++ functions whose names change between builds.

Measured times are not for ever. They are not kept where equal steps took very
different times, because something else was computing; and where three answers
of a chat in turn took 1.5 times as long as they say, or as short, they are
measured again while you read the next one.

How many tokens are drafted depends on the tokens and on the measured times,
never on the clock, so a record of `run --record` replays byte for byte.

The line below an answer says what became of it:

  drafted 260, accepted 212 · 3.1 tokens a step · 1.6x

The last is an estimate: tokens a step, over the measured time of a step as
wide as these were on average, compared with that of a single row. In a chat,
/speculation on tints accepted tokens; the answer is shown as it is then,
without Markdown."""

INFERENCE = """\
Inference: how a model makes an answer, step by step, and what shows each step.

A language model computes one thing: of a row of tokens, how likely each token
of its vocabulary is to come next. An answer is that, again and again.

  tokenization   Text is cut into tokens: frequent words, parts of rarer ones,
                 single bytes of the rest. The model sees their numbers only.
                   llmrun tokenize MODEL "some text" --merges
  chat template  Turns of a conversation become one text, with control tokens
                 that say whose turn it is.
                   llmrun tokenize MODEL "<|im_start|>user"
  embedding      Each token's number picks a row of a table: a vector of some
                 hundreds or thousands of numbers, from which all else follows.
                   llmrun show MODEL       (width)
  positions      Attention alone would not know the order of words. RoPE turns
                 queries and keys by an angle that grows with the position.
                   llmrun show MODEL       (positions, context)
  transformer    Layer after layer adds to each token's vector, the residual
                 stream. Attention brings in what other tokens know: each head
                 compares the token's query with the keys of all tokens up to
                 it, and takes a mean of their values, weighted by how well
                 they match. The feed-forward part then works on each token
                 alone, with most of the weights; in a mixture of experts only
                 a few of many such parts wake for a token.
                   llmrun explain MODEL "..."; /explain in a chat
  logits         The last vector is compared with each token's row of the
                 output matrix. Those are the logits; softmax makes
                 probabilities of them.
                   llmrun explain MODEL "..."      (logit lens)
                   llmrun explain MODEL "..." --html FILE  (each token)
  sampling       One token is drawn. Temperature flattens or sharpens the
                 probabilities; top-k, top-p and min-p cut off what is
                 unlikely; penalties push down what was said before.
                   llmrun run MODEL "..." --explain-sampling, /why in a chat
                   llmrun explain MODEL "..." --html FILE  (try values)

Two phases, two limits:

  prefill        All tokens of the prompt go through the model together: the
                 weights are read once for hundreds of tokens, so that
                 arithmetic is the limit. It decides the time to the first
                 token (TTFT).
                   llmrun bench MODEL -p 512
  decode         Each token of the answer needs all of the weights again, one
                 token at a time, so that the memory's bandwidth is the limit:
                 a file of 4 GB on a machine that reads 40 GB/s gives at most
                 10 tokens a second.
                   llmrun bench MODEL -n 128
  KV cache       Keys and values of earlier tokens are kept, or each token
                 would have to compute them anew. The cache grows with every
                 token, up to the context window. Heads that share keys and
                 values (GQA), layers that look back only so far (sliding
                 windows), and q8_0 in place of f16 make it smaller.
                   llmrun show MODEL       (KV cache)
                   llmrun plan MODEL; /context in a chat

And what makes it faster or smaller:

  batching       While the weights are read, they can serve several requests:
                 each of them waits hardly longer, and together they get many
                 times the tokens a second.
                   llmrun serve MODEL; llmrun bench MODEL --clients 1-8
  quantization   Weights in 4 or 5 bits in place of 16: a third of the bytes
                 to hold and to read, for a loss that can be measured.
                   llmrun quantize MODEL; llmrun evaluate MODEL
  speculation    Tokens are guessed from the text so far, and several are
                 checked in one decode step; the choice stays the same.
                   llmrun help speculation"""

TOPICS = {
    "exit-codes": "\n".join(f"{status:>4}  {meaning}" for status, meaning in EXIT_CODES.items()),
    "inference": INFERENCE,
    "speculation": SPECULATION,
    "tools": TOOLS,
}


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPIC",
            help=f"A command, or {', '.join(TOPICS)}.",
            autocompletion=complete_words(*COMMANDS, *TOPICS),
        ),
    ],
) -> None:
    """Help on a command or topic."""
    if words[0] in TOPICS and len(words) == 1:
        Output().text(TOPICS[words[0]])
    elif words[0] in COMMANDS or words[0] in ALIASES:
        context.find_root().command.main([*words, "--help"], prog_name="llmrun", standalone_mode=False)
    else:
        raise UsageError(f"there is no help on {words[0]!r}", hint=f"llmrun help, or llmrun help {' or '.join(TOPICS)}")
