"""The command line: ``refengine COMMAND``. Bad input is one line on stderr and exit status 2; a finding is status 1."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from backends.base import BackendError
from kernels_numba.machine import KernelError
from refengine import __version__
from refengine import debug as debug_mode
from refengine.errors import UserError

UsageError: type = typer.BadParameter.__mro__[1]
"""A call that the parser refuses; the class stands in another module in each version of typer."""
STOPPED, NO_READER = 130, 141
"""Exit statuses of a shell's own tools after Ctrl-C and after the reader of a pipe has left."""

app = typer.Typer(
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="A reference engine for paged attention: read the kernels, run them without a GPU, prove backends equal, bit "
    "for bit.\n\nExample: `refengine compare qwen3.5-tiny --page-size 48 --prompt-tokens 300 --tokens 8`",
    epilog="Exit status: 0 all is well; 1 a finding (different, unchecked, changed); 2 a bad call or file.",
)

DeviceName = Annotated[str, typer.Option("--device", help="Where to run: auto, cpu or cuda.")]
Kv = Annotated[str, typer.Option("--kv", help="What a cache row is made of: bf16 or fp8.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report to this file, too.")]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"refengine {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on failure; in any place.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command; ``main`` has taken --debug out before this is called."""


@app.command()
def compare(
    model: Annotated[
        str, typer.Argument(help="A registry name (`refengine models`) or a checkpoint folder.")
    ] = "qwen3.5-tiny",
    backends: Annotated[
        str, typer.Option(help="Backends by name; the others are held against the first.")
    ] = "window,paged,paged-p256",
    page_size: Annotated[int, typer.Option(help="Positions a page of the paged backend.")] = 48,
    prompt: Annotated[str | None, typer.Option(help="The prompt, or @FILE. Default: random tokens.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the prompt: the first of --prompt, or random ones (600).")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    parallel: Annotated[int, typer.Option(help="Streams at once; the n-th has the prompt rotated by n tokens.")] = 1,
    prompt_rows: Annotated[int, typer.Option(help="Rows a prompt pass, at most 4096.")] = 256,
    context: Annotated[
        int | None, typer.Option(help="Positions a stream has room for. Default: what it needs.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Refuse a cache larger than this.")] = None,
    device: DeviceName = "auto",
    json: Json = None,
    seed: Annotated[int, typer.Option(help="Of the synthetic checkpoint, the random prompt and the page order.")] = 0,
    kv: Kv = "bf16",
    attention: Annotated[
        str,
        typer.Option(
            help="Kernels: tiles; scalar-batch or scalar-decode send passes that hold pages to the scalar path."
        ),
    ] = "tiles",
    page_order: Annotated[
        str,
        typer.Option(help="How pages are handed out: shuffled by --seed, or reversed, so that every table descends."),
    ] = "shuffled",
) -> None:
    """Run a prompt and a decode through each backend and compare them, bit for bit.

    Ends with EQUAL, DIFFERENT and the first place where they part, or UNCHECKED and why nothing was proved.

    Example: `refengine compare qwen3.5-tiny --page-size 48 --prompt @docs/prompt.txt --tokens 8`
    """
    from refengine.commands.compare import Request, run

    names = tuple(n.strip() for n in backends.split(",") if n.strip())
    request = Request(
        model, names, page_size, prompt, prompt_tokens, tokens, parallel, prompt_rows, context, memory_gib, device, seed,
        kv, attention, page_order,
    )  # fmt: skip
    raise typer.Exit(run(request, json))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A registry name (`refengine models`) or a checkpoint folder.")],
    prompt: Annotated[str, typer.Option(help="The prompt, or @FILE.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's turn: put it into the checkpoint's chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What the conversation starts with, or @FILE; with --chat.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, tokens are drawn.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    backend: Annotated[str, typer.Option(help="The form of cache, by name.")] = "paged",
    page_size: Annotated[
        int | None, typer.Option(help="Positions a page, where the backend lets one choose. [default: 256]")
    ] = None,
    kv: Annotated[str, typer.Option(help="What cache rows are made of: bf16 or fp8.")] = "bf16",
    drafts: Annotated[
        str, typer.Option(help="Who guesses tokens ahead: none, ngram, mtp or both. The reply is the same.")
    ] = "none",
    device: DeviceName = "auto",
    json: Json = None,
) -> None:
    """Text in, text out: stream a model's reply to stdout. Greedy, unless --temperature says otherwise.

    A registry name has generated weights, whose text is noise; its tokens are bytes.

    Example: `refengine generate qwen3.5-tiny --prompt @docs/prompt.txt --tokens 32`
    """
    from refengine.commands.generate import Request, run
    from refengine.serve.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    request = Request(model, prompt, chat, system, tokens, sampling, backend, page_size, kv, drafts, device)
    raise typer.Exit(run(request, json))


@app.command()
def equal(
    model: Annotated[
        str, typer.Argument(help="A registry name (`refengine models`) or a checkpoint folder.")
    ] = "qwen3.5-tiny",
    kv: Annotated[str, typer.Option(help="What cache rows are made of: bf16 or fp8.")] = "bf16",
    streams: Annotated[str, typer.Option(help="How many at once; every number is run.")] = "1,2,4,8",
    page_sizes: Annotated[
        str, typer.Option(help="Positions a page; every size is run, 256 also as paged-p256.")
    ] = "48,256",
    tokens: Annotated[int, typer.Option(help="Tokens to generate of each stream.")] = 8,
    prompt_tokens: Annotated[
        int,
        typer.Option(help="Tokens of the longest prompt, at most 4096; the others have a fifth, a ninth, and so on."),
    ] = 272,
    prompt_rows: Annotated[str, typer.Option(help="Rows a prompt pass, of equality 5a.")] = "17,100",
    attention: Annotated[str, typer.Option(help="Attention kernels: tiles, scalar-batch or scalar-decode.")] = "tiles",
    only: Annotated[str | None, typer.Option(help="One equality: 1, 2, 3, 4, 5a, 5b or 6. Default: all.")] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Plant a fault for each equality, which must fail, and run nothing else.")
    ] = False,
    device: DeviceName = "auto",
    json: Json = None,
    seed: Annotated[int, typer.Option(help="Of weights, prompts, page order and draws.")] = 0,
) -> None:
    """Run the serving equalities, bit for bit: 1 paged == window, 2 together == alone, 3 resumed == fresh, 4 drafted == plain, 5a
    chunked == one pass, 5b preempted or waited == not, 6 more streams than the pool has room for == each alone.

    Ends `EQUALITIES n held, m failed, k unchecked`; a check that was not put to the test is unchecked.

    Example: `refengine equal qwen3.5-tiny --kv bf16 --streams 1,2 --page-sizes 48`
    """
    from refengine.commands.equal import Request, run

    request = Request(
        model, kv, attention, streams, page_sizes, tokens, prompt_tokens, prompt_rows, only, device, seed, controls,
    )  # fmt: skip
    raise typer.Exit(run(request, json))


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="Show this entry in full.")] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Hold a checkpoint's config and tensors against the entry.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Positions a page, for the bytes a page.")] = 256,
    json: Json = None,
) -> None:
    """Show the registry: layers, heads, KV bytes a token, bytes a page, bytes of recurrent state.

    Example: `refengine models qwen3.5-tiny --page-size 48`
    """
    from refengine.commands.models import run

    raise typer.Exit(run(name, check, page_size, json))


@app.command()
def inspect(
    kernel: Annotated[str | None, typer.Argument(help="A kernel by name. Default: all that are launched.")] = None,
    model: Annotated[str, typer.Option(help="Whose launches: a registry name.")] = "qwen3.5-tiny",
    backend: Annotated[str, typer.Option(help="Through which backend.")] = "paged",
    sm: Annotated[str, typer.Option(help="Architectures.")] = "80,86,89,90,100,120,121",
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX, which all architectures share.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code of the first architecture.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hold the machine code against an earlier --json.")
    ] = None,
    json: Json = None,
) -> None:
    """Show what kernels compile to, without a GPU: registers, shared memory, stack, spills, code size.

    Example: `refengine inspect prompt_attention --backend paged --sm 80,90`
    """
    from refengine.commands.inspect import Request, run

    raise typer.Exit(run(Request(kernel, model, backend, sm, ptx, sass, against), json))


@app.command()
def contract(
    kernels: Annotated[list[str] | None, typer.Argument(help="Entries by name. Default: every kernel.")] = None,
    device: DeviceName = "auto",
    full: Annotated[bool, typer.Option("--full", help="Every case: hours without a GPU.")] = False,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Plant every fault in the sources, and run nothing else.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write records/*.yaml anew, show what changed, and run no case.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Hold the bits against an earlier --json. Default: the checkout's of an H200."
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="This backend alone, by its registered name; a plug-in's, say.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    json: Json = None,
) -> None:
    """Put every kernel through its gates: bound, exact, repeats, guards, limits; planted faults must come out red.

    Example: `refengine contract prompt_attention --device cpu`
    """
    from refengine.commands.contract import Request, run

    request = Request(tuple(kernels or ()), device, full, mutate, seed, record=record, against=against, backend=backend)
    raise typer.Exit(run(request, json))


@app.command()
def pool(
    model: Annotated[str, typer.Argument(help="A registry name (`refengine models`).")] = "qwen3.8-27b",
    requests: Annotated[
        str,
        typer.Option(
            metavar="FILE|SHORT",
            help="COUNTxPROMPT+REPLY in tokens, commas between several; or a YAML file of requests.",
        ),
    ] = "16x109000+48",
    parallel: Annotated[int, typer.Option(help="Streams at once: reserved with windows, a cap with pages.")] = 16,
    context: Annotated[int, typer.Option(help="Positions of a stream, at most.")] = 131072,
    kv_pages: Annotated[
        int | None, typer.Option(help="This page size alone; 0: windows alone. Default: windows and --page-sizes.")
    ] = None,
    kv_pages_all: Annotated[
        str, typer.Option(help="1: every stream takes pages; anything else: the first keeps a window.")
    ] = "1",
    page_sizes: Annotated[str, typer.Option(help="Positions a page; every size is run.")] = "16,48,256",
    kv: Kv = "bf16",
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Memory of the device. Default: what leaves 88 GiB beside the model and the reserve."),
    ] = None,
    prompt_rows: Annotated[int, typer.Option(help="Rows a prompt pass, all streams together.")] = 4096,
    prompt_cache: Annotated[
        bool, typer.Option("--prompt-cache/--no-prompt-cache", help="Keep prompts in pages for those that begin alike.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw who holds the memory into this file, .svg or .png.")] = None,
    json: Json = None,
    seed: Annotated[int, typer.Option(help="Of the prompts' tokens.")] = 0,
) -> None:
    """Simulate the admission of a list of requests: what fits, who waits, and what is wasted, for each page size.

    The engine's own scheduler, pool and prompt cache run; nothing is computed and no memory is taken. Ends
    `POOL n requests: m finished, k waited, r refused`.

    Example: `refengine pool qwen3.8-27b --requests 16x109000+48 --page-sizes 48,256`
    """
    from refengine.commands.pool import Request, run

    request = Request(
        model, requests, parallel, context, kv_pages, kv_pages_all, page_sizes, kv, memory_gib, prompt_rows, prompt_cache,
        seed,
    )  # fmt: skip
    raise typer.Exit(run(request, plot, json))


@app.command()
def trace(
    kernel: Annotated[str, typer.Argument(help="A kernel by name, or an entry of the contract.")] = "prompt_attention",
    layout: Annotated[str | None, typer.Option(help="The form of cache: window, paged or paged-p256.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Positions a page, of the paged layout.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the first stream in the launch.")] = None,
    block: Annotated[str, typer.Option(help="Which block of the grid, as x,y,z.")] = "0,0,0",
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: trace-KERNEL.html.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw one step into this file, .svg.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Which step --svg shows. Default: the first that looks up a second page.")
    ] = None,
    json: Json = None,
) -> None:
    """Run one block of a kernel and write down every load, store, copy, barrier, shuffle and mma, as a page to step
    through: source lines with their bytes, page lookups and bank conflicts, the pages, shared memory.

    The launch is a case of the contract, on the CPU machine. Ends `TRACED ...`, or `FAULT` and what checked mode found.

    Example: `refengine trace prompt_attention --page-size 48 --out walk.html`
    """
    from refengine.commands.trace import Request, run
    from refengine.lab.kernel_case import Wish

    raise typer.Exit(run(Request(Wish(kernel, layout, page_size, rows, block), out, svg, step), json))


@app.command("debug")
def debug_kernel(
    kernel: Annotated[str, typer.Argument(help="A kernel by name, or an entry of the contract.")] = "prompt_attention",
    layout: Annotated[str | None, typer.Option(help="The form of cache: window, paged or paged-p256.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Positions a page, of the paged layout.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the first stream in the launch.")] = None,
    block: Annotated[str, typer.Option(help="Which block of the grid, as x,y,z.")] = "0,0,0",
    lane: Annotated[
        int | None, typer.Option(help="Whose values expressions have. Default: arrays of all lanes.")
    ] = None,
    stops: Annotated[
        list[str] | None,
        typer.Option("--break", metavar="LINE|NAME", help="Run to a line, or to a device function; may be repeated."),
    ] = None,
    prompt: Annotated[
        bool, typer.Option("--prompt/--no-prompt", help="--no-prompt: run on, for the breakpoints of an editor.")
    ] = True,
    checked: Annotated[bool, typer.Option("--checked", help="Stop at races and missing waits, too.")] = False,
) -> None:
    """Step through one block of a kernel with pdb, at its own lines: a statement runs for all threads at once.

    `lane N` shows a thread's values, `lanes` all of them as arrays, `where` the block, the loops' turns and the lines.

    Example: `refengine debug prompt_attention --break fold_row --lane 5`
    """
    from refengine.commands.debug import Request, run
    from refengine.lab.kernel_case import Wish

    wish = Wish(kernel, layout, page_size, rows, block)
    raise typer.Exit(run(Request(wish, lane, tuple(stops or ()), prompt, checked)))


@app.command()
def explain(
    a: Annotated[str, typer.Argument(metavar="A", help="A report of `compare --json`, or FILE:BACKEND.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Another. Default: of A's report, the backend that differs from A's."),
    ] = None,
    plant: Annotated[
        str | None, typer.Option(help="Plant a fault of `equal --controls` in B, by a part of its name.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run again: auto, cpu or cuda.")] = "cpu",
    json: Json = None,
) -> None:
    """Run two runs of one request again and say where they part: pass, layer, row, head and dim; the first key whose rows
    differ, with page and slot in both; and both folds (m, l, o), tile by tile, until they part.

    Ends `PARTED ...`, `EQUAL ...`, or `UNCHECKED` where a run does not repeat its report.

    Example: `refengine explain tiles.json scalar.json`, each written by `refengine compare --json`
    """
    from refengine.commands.explain import Request, run

    raise typer.Exit(run(Request(a, b, plant, device), json))


tutorial_app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="The exercises of the tutorials: begin one, check the answers.\n\nExample: `refengine tutorial start 01`",
)
app.add_typer(tutorial_app, name="tutorial")
TutorialNumber = Annotated[str, typer.Argument(metavar="NUMBER", help="Of the tutorial: 01, or 1.")]


@tutorial_app.command("start")
def tutorial_start(
    number: TutorialNumber,
    folder: Annotated[Path, typer.Argument(help="Where to put them.")] = Path("answers"),
) -> None:
    """Write a file of empty answers, FOLDER/tNN.py: functions whose docstrings say what to do.

    Example: `refengine tutorial start 01`
    """
    from refengine.commands.tutorial import start

    raise typer.Exit(start(number, folder))


@tutorial_app.command("check")
def tutorial_check(
    number: TutorialNumber,
    answers: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the answers lie.")] = Path("answers"),
    solution: Annotated[bool, typer.Option("--solution", help="Check the solution instead.")] = False,
) -> None:
    """Run a tutorial's tests on your answers. Ends `TUTORIAL NN m of n passed`; status 0 only if all did.

    Example: `refengine tutorial check 01`
    """
    from refengine.commands.tutorial import check

    raise typer.Exit(check(number, answers, solution))


# --- From the call to the exit status -------------------------------------------------------------------------------


def main() -> None:
    """Entry point of the ``refengine`` command."""
    debug, arguments = split_debug(sys.argv[1:])
    debug_mode.on = debug
    call = partial(app, arguments or ["--help"], prog_name="refengine", standalone_mode=False)
    sys.exit(status_of(call, debug))


def split_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether --debug stands among the options, and the arguments without it; after ``--`` nothing is an option."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [a for a in arguments[:end] if a != "--debug"]
    return len(kept) < end, [*kept, *arguments[end:]]


def status_of(call: Callable[[], int | None], debug: bool) -> int:
    """The exit status of a command; what goes wrong is one line on stderr, or with debug a traceback."""
    try:
        status = call() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (KeyboardInterrupt, typer.Abort):
        return STOPPED
    except Exception as problem:
        if debug:
            traceback.print_exc()
        else:
            print(f"refengine: {one_line(problem)}", file=sys.stderr)
        return 2


def one_line(problem: Exception) -> str:
    """What went wrong and what would do."""
    if isinstance(problem, (UserError, BackendError, KernelError)):
        text = str(problem)
    elif isinstance(problem, UsageError):
        where = problem.ctx.command_path if problem.ctx else "refengine"  # type: ignore[attr-defined]
        text = f"{problem.format_message()} (see {where} --help)"  # type: ignore[attr-defined]
    else:
        text = f"stopped by {type(problem).__name__}: {problem}; run it again with --debug for the traceback"
    return " ".join(text.split())


if __name__ == "__main__":
    main()
