"""The typed schema: every key of a run, its type, its default, what it means. docs/config.md is generated from here.

`None` means off, `"auto"` means work it out. Pydantic checks the values (https://docs.pydantic.dev); compose.py turns
what it finds into messages that name the key.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from tonnage.facts.gpus import GPUS


def _no_switch(value):
    """pydantic takes true for 1: `checkpoint.every_steps=true` would save after each step."""
    if isinstance(value, bool):
        raise ValueError("a switch (true or false) is no number")
    return value


NUMBER = BeforeValidator(_no_switch)
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1), NUMBER]
Threads = Annotated[int, Field(ge=1, le=1024), NUMBER]
Fraction = Annotated[float, Field(ge=0.0, le=1.0), NUMBER]
Decay = Annotated[float, Field(ge=0.0, lt=1.0), NUMBER]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False), NUMBER]
Weight = Annotated[float, Field(gt=0.0, le=1000.0), NUMBER]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False), NUMBER]
# YAML reads 12:00:00 without quotes as a number of seconds, SLURM takes numbers for minutes: only this form is taken
Duration = Annotated[str, Field(pattern=r"^(\d+-)?\d+:\d\d:\d\d$", description="a time like '12:00:00' or '2-00:00:00'")]
Line = Annotated[str, Field(pattern=r"^[^\n\r]*$", description="a one-line text")]

section = dataclass(frozen=True, config=ConfigDict(extra="forbid"), kw_only=True)


def key(default: Any, text: str) -> Any:
    """A schema field: its default and the sentence that docs/config.md prints."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"text": text})
    return field(default=default, metadata={"text": text})


@section
class Run:
    name: str | None = key(None, "name of the run folder; None gives <model>-<adapter>-<UTC time>-<4 hex digits>")
    root: str = key("outputs", "where run folders are made")
    fork: bool = key(False, "on resume: allow changes of data, seed, global batch or optimizer, in a new run folder")


@section
class Batch:
    global_rows: Count | Auto = key("auto", "rows of one optimizer step, over all GPUs; auto is 128 unless the other "
                                            "keys fix it")
    global_tokens: Count | None = key(None, "instead of global_rows: as many whole rows as stay within this many "
                                            "non-padding input tokens (at least one)")
    micro_rows: Count | Auto = key("auto", "rows of one forward and backward on one GPU, at most; auto is the largest "
                                           "that the plan says fits, within 16,384 tokens; on CPUs within 4,096")
    accumulation_steps: Count | Auto = key("auto", "micro-batches of one optimizer step on the busiest GPU")


@section
class Model:
    name: str = key("custom", "a model of docs/models.md, or custom")
    path: str | None = key(None, "a folder, a GGUF file or a hub id; auto: as shipped with an installed package")
    revision: str | None = key(None, "branch, tag or commit on the hub")
    attention: Literal["auto", "sdpa", "flash", "eager", "flex"] = key(
        "auto", "attention kernel; auto is flash where flash-attn is installed and a GPU is used, sdpa otherwise")
    compile: bool = key(False, "compile each decoder layer with torch.compile")
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "full", "full: keep only each layer's input and compute the layer again in backward; selective: keep the results "
                "of its matrix products and attention, too, and compute again what is cheap between them")
    checkpoint_every_layers: Count = key(1, "checkpoint every n-th layer only; the others keep everything")
    checkpoints_on_host: bool = key(False, "move the kept inputs of layers from the GPU to host memory until "
                                           "backward")
    new_tokens: list[str] = key([], "tokens to add; their embeddings (and the head) are trained and saved, with "
                                    "adapters too")
    trust_remote_code: bool = key(False, "run the Python code that a model folder brings")
    allow_pickle: bool = key(False, "read weights from pickle files (weights only) where no safetensors exist")


@section
class Adapter:
    name: Literal["full", "lora", "dora", "rslora", "qlora"] = key(
        "lora", "what is trained: every weight, or an adapter; qlora is lora with quantise=nf4")
    quantise: Literal["none", "nf4", "int8", "fp8"] = key(
        "none", "how the frozen matrices of the decoder are kept: none is the compute precision; fp8 keeps files in "
                "DeepSeek-V3's format as they are")
    rank: Count = key(16, "rank r of the two adapter matrices")
    alpha: Positive = key(32.0, "scale: the update is alpha/rank (rslora: alpha/sqrt(rank)) times B A")
    dropout: Decay = key(0.0, "dropout on the adapter's input; above 0, exactness across cuts is not claimed")
    targets: list[str] = key(["all-linear"], "linear layers to adapt, by the end of their names; all-linear: every "
                                             "linear layer of the decoder but routers and the head; experts: the "
                                             "routed experts, too")


@section
class Strategy:
    name: Literal["auto", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = key(
        "auto", "how states are spread over GPUs; auto: of those that offload as asked, on GPUs the least sharding that "
                "the plan says fits, zero1 to zero3 under the deepspeed launcher, else ddp, hsdp (not with offload), fsdp; "
                "on CPUs zero3 or fsdp, on one zero1 or ddp; with hpz_gpus zero3, with expert_gpus fsdp")
    offload: Literal["none", "optimizer", "all", "nvme"] = key(
        "none", "what lives in host memory (or on NVMe): the optimizer, or parameters too")
    nvme_path: str | None = key(None, "folder on a local NVMe disk, for offload=nvme")
    shard_gpus: Count | Auto = key("auto", "hsdp: GPUs that share one copy of the weights; auto is one node's GPUs")
    reshard_after_forward: bool = key(True, "fsdp, hsdp: free gathered weights after forward and gather them again "
                                            "in backward")
    fp8_all_gather: bool = key(False, "fsdp, hsdp with precision=fp8: gather in FP8 what is multiplied in FP8, half the "
                                      "bytes; what is learned stays the same")
    expert_gpus: Count = key(1, "fsdp: GPUs that share one copy of the routed experts, each whole on one of them; tokens "
                                "travel, nothing of an expert is gathered among them; 1: experts are sharded as the rest")
    hpz_gpus: Count = key(1, "zero3: GPUs of a node that hold a second copy of the weights among them, from which they are "
                             "gathered again until a step changes them (ZeRO++'s hpZ); 1: none")
    sequence_gpus: Count = key(1, "GPUs that share the tokens of each row: each holds a slice, and heads travel for "
                                  "attention; 1: each has rows of its own")
    extra: dict[str, Any] = key({}, "raw DeepSpeed keys, added to the generated JSON; may not contradict it")


@section
class Precision:
    name: Literal["bf16", "fp32", "fp16", "fp8"] = key(
        "bf16", "compute precision; trained weights, gradients' sums and optimizer states are fp32 in each; fp8 is bf16 "
                "with the products of the decoder's linear layers in FP8")
    fp8_recipe: Literal["tensorwise", "rowwise"] = key(
        "tensorwise", "fp8: one scale a tensor, which is faster, or one a row, which is closer to bf16")
    fp8_emulate: bool = key(False, "fp8: on what has no FP8 units, round to FP8 and multiply in fp32: for trying out, slow")

    @property
    def dtype(self) -> str:
        """What weights are gathered in and activations held in: of fp8, which is only within products, bf16."""
        return "bf16" if self.name == "fp8" else self.name


@section
class Optimizer:
    name: Literal["adamw", "adamw8bit", "sgd"] = key("adamw", "update rule")
    learning_rate: Positive | Auto = key("auto", "peak learning rate; auto is 2e-4 with an adapter, 1e-5 without")
    betas: tuple[Decay, Decay] = key((0.9, 0.95), "AdamW's decay rates of the two moments")
    eps: Positive = key(1e-8, "AdamW's epsilon")
    momentum: Decay = key(0.9, "sgd's momentum")
    weight_decay: NonNegative = key(0.0, "decoupled weight decay (sgd: L2)")
    decay_all: bool = key(False, "decay norms, biases and embeddings too")
    clip_norm: Positive | None = key(1.0, "gradients are scaled down to this global norm; None is off")
    scale_lr: Literal["none", "linear", "sqrt"] = key("none", "scale the learning rate by global_rows / base_rows")
    base_rows: Count = key(128, "the global batch that learning_rate was chosen for, for scale_lr")


@section
class Schedule:
    name: Literal["constant", "linear", "cosine", "wsd"] = key("cosine", "shape of the learning rate after warm-up")
    warmup_steps: Annotated[int, Field(ge=0), NUMBER] | Auto = key("auto", "steps of linear warm-up; auto is 3 % of the "
                                                                          "run")
    final_fraction: Fraction = key(0.1, "learning rate at the last step, relative to the peak")
    decay_fraction: Fraction = key(0.2, "wsd: share of the run that decays at the end")


@section
class DataSet:
    path: str = key("", "a file, a folder or a hub id")
    format: Literal["auto", "chat", "instruct", "completion", "text"] = key("auto", "what a record holds")
    split: str = key("train", "split of a hub data set or folder")
    subset: str | None = key(None, "configuration name of a hub data set")
    weight: Weight = key(1.0, "times each row is seen per epoch; 0.5 is a different half each epoch")
    columns: dict[str, str] = key({}, "our field name to the record's, e.g. {prompt: question}")


@section
class Data:
    name: str = key("files", "name of the preset")
    path: str | None = key(None, "short for one data set: sets=[{path: ...}]")
    format: Literal["auto", "chat", "instruct", "completion", "text"] = key("auto", "format of data.path")
    sets: list[DataSet] = key([], "several data sets with weights")
    seq_tokens: Count = key(2048, "tokens of a row; longer samples are cut")
    packing: bool = key(False, "fill rows with several samples, which do not see each other")
    truncate: Literal["end", "start", "drop"] = key("end", "samples longer than seq_tokens: cut the end, cut the "
                                                           "start, or drop them")
    train_on: Literal["assistant", "all"] = key("assistant", "tokens with a loss: the answers, or everything")
    system: str | None = key(None, "system message for chats that have none")
    chat_template: str | None = key(None, "a Jinja file that replaces the tokenizer's chat template")
    on_bad: Literal["error", "skip"] = key("error", "a record that cannot be used: stop, or count and go on")
    max_dropped_fraction: Fraction = key(0.2, "stop if more samples than this have no token left to learn from")
    streaming: bool = key(False, "read while training; needs train.max_steps")
    buffer_rows: Count = key(1024, "streaming: rows held for shuffling and packing")
    cache: str = key("auto", "folder of prepared data; auto is ~/.cache/tonnage")


@section
class Eval:
    path: str | None = key(None, "held-out data: a file, a folder or a hub id")
    split: str = key("validation", "split of a hub data set or folder")
    format: Literal["auto", "chat", "instruct", "completion", "text"] = key("auto", "format of eval.path")
    holdout_fraction: Fraction = key(0.0, "without eval.path: share of the training samples to hold out")
    every_steps: Count | None = key(None, "evaluate every n steps; always before the first and after the last step")
    max_rows: Count | None = key(None, "evaluate on the first n rows only")
    metric: Literal["loss"] = key("loss", "what the best checkpoint is best in: token-weighted held-out loss")
    prompts: list[str] = key([], "user messages answered greedily before and after training")
    prompt_tokens: Count = key(64, "most new tokens of such an answer")


@section
class Train:
    epochs: Count = key(1, "passes over the data")
    max_steps: Count | None = key(None, "stop after this many optimizer steps")
    loss: Literal["auto", "chunked", "plain"] = key("auto", "chunked never holds the whole logits; auto is chunked "
                                                            "where the head allows it")
    loss_chunk_tokens: Count = key(1024, "label tokens whose logits are held at once")
    router_aux_loss: NonNegative | Auto = key("auto", "mixtures of experts: weight of the balance loss, a row at a time; "
                                                      "auto is config.json's where every weight is trained, else 0")
    router_bias_rate: NonNegative | Auto = key("auto", "DeepSeek-V3: how far a window moves the routers' biases; auto is "
                                                       "0.001 where every weight is trained, else 0")
    max_nonfinite_steps: Count = key(5, "stop after this many steps in a row with a non-finite gradient")
    audit: bool = key(True, "after the first steps, check that every trained tensor has received a gradient")


@section
class Checkpoint:
    every_steps: Count | None = key(500, "write a checkpoint every n steps; one is always written at the end")
    keep: Count = key(2, "newest checkpoints to keep")
    keep_best: bool = key(True, "write and keep a checkpoint whenever eval.metric is the best so far")
    keep_every_steps: Count | None = key(None, "keep every n-th step's checkpoint for good")


@section
class Tracker:
    name: Literal["none", "tensorboard", "wandb", "mlflow"] = key("tensorboard", "where metrics go besides "
                                                                                 "metrics.jsonl")
    project: str = key("tonnage", "project or experiment name")
    every_steps: Count = key(1, "give the tracker every n-th step; metrics.jsonl has every step")


@section
class Gpu:
    name: Literal[("auto", "other", *GPUS)] = key("auto", "the GPU that is planned for; auto is the one found here")
    memory_gib: Positive | None = key(None, "its memory as torch sees it; None takes the table's, other needs it")
    price_usd_h: NonNegative | None = key(None, "what one costs an hour; None takes the table's range")


@section
class Plan:
    refuse: bool = key(True, "do not start what the plan says cannot fit")


@section
class Cluster:
    name: Literal["local", "slurm", "kubernetes"] = key("local", "where launch/submit.py sends the run")
    gpus_per_node: Count | Auto = key("auto", "GPUs of one node; auto is what this machine shows (plan, submit: 8)")
    network_gb_s: Positive | Auto = key("auto", "one way between nodes, GB/s for each GPU; auto is 50: one 400 Gb/s "
                                                "InfiniBand port a GPU, as in an NVIDIA DGX H100")
    timeout_s: Positive = key(1800.0, "a collective that takes longer ends the run")
    hang_s: Positive | Auto = key("auto", "a rank that stays longer in one micro-batch, one update, one tensor of a "
                                          "checkpoint ends the run and is named; auto is two thirds of timeout_s")
    max_restarts: Annotated[int, Field(ge=0), NUMBER] = key(
        0, "times a run is started again from its newest checkpoint when a rank is lost (a signal, the kernel for want "
           "of memory, a connection, a GPU fault, a hang); two starts in a row without a new checkpoint end it")
    launcher: Literal["torchrun", "deepspeed", "srun"] = key(
        "torchrun", "what starts the ranks of a node: torchrun or deepspeed, once a node, or srun, once a rank")
    partition: Line | None = key(None, "partition, or several with commas")
    account: Line | None = key(None, "account that is charged")
    qos: Line | None = key(None, "quality of service")
    constraint: Line | None = key(None, "features that nodes must have, as in a100&nvlink")
    exclude: Line | None = key(None, "nodes to stay away from")
    time: Duration | None = key(None, "time limit; behind it the job is requeued and goes on")
    begin: Line | None = key(None, "not before, for off-peak hours: 20:00, now+2hours, 2027-01-31T18:00")
    exclusive: bool = key(False, "no other jobs on its nodes")
    gpu_request: Literal["gpus-per-node", "gres"] = key("gpus-per-node", "how GPUs are asked for")
    gpu_type: Line | None = key(None, "the type SLURM knows these GPUs by, where it has several")
    cpus_per_gpu: Count | None = key(None, "cores for each rank")
    memory_gib: Positive | Auto | None = key("auto", "host memory of one node, GiB; auto is 1.5 times what the plan says, "
                                                     "null the partition's default")
    setup: list[Line] = key([], "lines of shell before the ranks start: modules, a virtual environment")
    environment: dict[str, Any] = key({}, "variables to export to the ranks; secrets stay in your own environment")
    interface: Line | None = key(None, "network interface where ranks meet, e.g. ib0, for gloo and NCCL; null: they choose")
    container: Line | None = key(None, "command that runs another in a container, e.g. apptainer exec --nv image.sif")
    srun_args: list[Line] = key([], "more arguments of srun, each in quotes: [\"--mpi=none\"]")
    sbatch_lines: list[Line] = key([], "more #SBATCH lines, each in quotes: [\"--mail-type=FAIL\"]")
    lead_s: Count | Auto = key("auto", "seconds before the time limit at which the run is asked to stop; auto: from the "
                                       "planned micro-step and save, 300 without a plan")
    requeue: bool = key(True, "put the job back into the queue when a limit, preemption or a lost node has ended it")
    starts_without_checkpoint: Count = key(3, "so many starts of a job with no new checkpoint are the last: it is broken")
    array_limit: Count | None = key(None, "sweeps: jobs of the array that run at the same time")
    image: Line | None = key(None, "kubernetes: container image that has this repository as its working directory")
    namespace: Line = key("default", "kubernetes: namespace")
    volume_claim: Line | None = key(None, "kubernetes: claim of a volume that all pods share, mounted at volume_path")
    volume_path: Line = key("/data", "kubernetes: where it is mounted; run folders and caches are kept there")


@section
class Config:
    """A whole run."""

    gpus: Count | Auto = key("auto", "ranks in all; auto is the GPUs visible here (CPU: 1)")
    device: Literal["auto", "cuda", "cpu"] = key("auto", "auto takes the CPU only where no GPU driver is present")
    cpu_threads: Threads | Auto = key("auto", "threads of one rank; auto divides the machine's cores by its ranks")
    seed: int = key(0, "seed of data order, adapters and dropout")
    dry_run: bool = key(False, "print what would be run and stop")
    run: Run = field(default_factory=Run)
    batch: Batch = field(default_factory=Batch)
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    strategy: Strategy = field(default_factory=Strategy)
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracker: Tracker = field(default_factory=Tracker)
    gpu: Gpu = field(default_factory=Gpu)
    plan: Plan = field(default_factory=Plan)
    cluster: Cluster = field(default_factory=Cluster)
