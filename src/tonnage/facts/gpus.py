"""The GPUs that Tonnage knows by name: memory, arithmetic, links, power, and what an hour costs.

TFLOP/s are dense, without sparsity. Link speeds are one way, per GPU. Worth reading: stas00/ml-engineering,
compute/accelerator (https://github.com/stas00/ml-engineering), which measures what the data sheets promise.
"""

from dataclasses import dataclass, replace

from tonnage.errors import ConfigError

PCIE4_GB_S, PCIE5_GB_S = 31.0, 63.0  # x16, one way. Source: PCI-SIG, 16 and 32 GT/s per lane, 128b/130b


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; None is not known.

    `memory_gib` is what torch sees, the lowest seen; `driver_memory_gib` what nvidia-smi prints. `matmul_tflops` is
    the fastest bf16 product that was measured, whatever its shape. `link_gb_s` joins the GPUs of a node: NVLink or
    xGMI, or PCIe through the host, where `link` begins with PCIe. `notes` name what has no source.
    """

    name: str
    title: str
    memory_gib: float
    driver_memory_gib: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    matmul_tflops: float | None = None
    memory_bandwidth_tb_s: float | None = None
    link: str = "PCIe"
    link_gb_s: float | None = None
    host_link_gb_s: float | None = None
    power_w: float | None = None
    price_low_usd_h: float | None = None
    price_high_usd_h: float | None = None
    price_date: str | None = None
    price_source: str | None = None
    source: str
    notes: str = ""

    @property
    def has_pcie_only(self) -> bool:
        """Whether GPUs of a node reach each other through the host alone."""
        return self.link.startswith("PCIe")


_LOGS = "memory: nvidia-smi tables and torch's OOM messages in public logs"
_PEAKS = (f"{_LOGS}; TFLOP/s and bandwidth: karpathy/nanochat nanochat/common.py, pytorch/torchtitan utils.py, "
          f"mosaicml/composer speed_monitor.py, Lightning throughput.py, stas00/ml-engineering compute/accelerator")
_RUNPOD = "deploybase.ai, RunPod: spot to on demand; low trust"
_MERCATUS = "mercatus-ai.com/blog/cloud-gpu-pricing: long tail to hyperscaler"
_GPU_SPEC = "power: huggingface.co/datasets/ohdoking/gpu_spec"
_HF = "power: huggingface.co/hardware/"
_NVLINK = "link: stas00/ml-engineering network"

# fmt: off
_TABLE = (
    Gpu(name="rtx3090", title="GeForce RTX 3090", memory_gib=23.68, driver_memory_gib=24.0, bf16_tflops=71.0,
        memory_bandwidth_tb_s=0.936, link_gb_s=PCIE4_GB_S, host_link_gb_s=PCIE4_GB_S, power_w=350,
        price_low_usd_h=0.22, price_high_usd_h=0.39, price_date="2026-03", price_source=_RUNPOD,
        source=f"{_PEAKS}; {_GPU_SPEC}", notes="driver memory unsourced; an NVLink bridge for pairs is optional"),
    Gpu(name="rtx4090", title="GeForce RTX 4090", memory_gib=23.64, driver_memory_gib=23.99, bf16_tflops=165.2,
        fp8_tflops=330.0, memory_bandwidth_tb_s=1.01, link="PCIe, no peer-to-peer", link_gb_s=PCIE4_GB_S,
        host_link_gb_s=PCIE4_GB_S, power_w=450, price_low_usd_h=0.34, price_high_usd_h=0.60, price_date="2026-03",
        price_source=_RUNPOD, source=f"{_PEAKS}; {_GPU_SPEC}", notes="fp8 unsourced"),
    Gpu(name="rtx5090", title="GeForce RTX 5090", memory_gib=31.34, driver_memory_gib=31.84, bf16_tflops=209.5,
        fp8_tflops=419.0, memory_bandwidth_tb_s=1.79, link_gb_s=PCIE5_GB_S, host_link_gb_s=PCIE5_GB_S, power_w=575,
        price_low_usd_h=0.69, price_high_usd_h=1.22, price_date="2026-03", price_source=_RUNPOD,
        source=f"{_PEAKS}; power: NVIDIA's announcement, January 2025, as on pcngames.com/?p=1085",
        notes="fp8 unsourced"),
    Gpu(name="a10", title="A10 / A10G", memory_gib=22.06, driver_memory_gib=22.49, bf16_tflops=125.0,
        memory_bandwidth_tb_s=0.6, link_gb_s=PCIE4_GB_S, host_link_gb_s=PCIE4_GB_S, price_low_usd_h=1.42,
        price_high_usd_h=1.42, price_date="2024-04", source=_PEAKS,
        price_source="AWS g5.12xlarge, 4 A10G at 5.67 USD/h, philschmid.de fsdp-qlora-llama3 (the date is the page's)",
        notes="125 TFLOP/s is the A10; the A10G of AWS has about 70, unsourced; power unsourced"),
    Gpu(name="l4", title="L4", memory_gib=22.03, driver_memory_gib=22.49, bf16_tflops=121.0, fp8_tflops=242.0,
        memory_bandwidth_tb_s=0.3, link_gb_s=PCIE4_GB_S, host_link_gb_s=PCIE4_GB_S, power_w=72, price_low_usd_h=0.44,
        price_high_usd_h=0.78, price_date="2026-03", price_source=_RUNPOD, source=_PEAKS,
        notes="fp8 unsourced; power from tables in public repositories, not from the data sheet"),
    Gpu(name="l40s", title="L40S", memory_gib=44.39, driver_memory_gib=44.99, bf16_tflops=362.0, fp8_tflops=733.0,
        memory_bandwidth_tb_s=0.864, link_gb_s=PCIE4_GB_S, host_link_gb_s=PCIE4_GB_S, power_w=350,
        price_low_usd_h=0.79, price_high_usd_h=2.75, price_date="2026-03",
        price_source=f"{_RUNPOD}; the high end: SkyPilot catalog v8, Nebius", source=_PEAKS,
        notes="memory with ECC on; power from tables in public repositories, not from the data sheet"),
    Gpu(name="a6000", title="RTX A6000", memory_gib=47.4, driver_memory_gib=47.99, bf16_tflops=155.0,
        memory_bandwidth_tb_s=0.768, link_gb_s=PCIE4_GB_S, host_link_gb_s=PCIE4_GB_S, power_w=300, source=_GPU_SPEC,
        notes="all but power unsourced; an NVLink bridge for pairs is optional; SkyPilot catalog v8 lists 1.09 USD/h "
              "without a date"),
    Gpu(name="a100_40gb", title="A100 40 GB SXM", memory_gib=39.4, driver_memory_gib=39.59, bf16_tflops=312.0,
        matmul_tflops=271.2, memory_bandwidth_tb_s=1.555, link="NVLink 3", link_gb_s=300.0,
        host_link_gb_s=PCIE4_GB_S, power_w=400, source=f"{_PEAKS}; {_NVLINK}; power: hmc-tech.com, from the data sheet",
        notes="memory seen by torch is derived; newer drivers print 40.0 GiB; no price found"),
    Gpu(name="a100_80gb", title="A100 80 GB SXM", memory_gib=79.15, driver_memory_gib=80.0, bf16_tflops=312.0,
        matmul_tflops=271.2, memory_bandwidth_tb_s=2.0, link="NVLink 3", link_gb_s=300.0, host_link_gb_s=PCIE4_GB_S,
        power_w=400, price_low_usd_h=0.80, price_high_usd_h=3.00, price_date="2026-05", price_source=_MERCATUS,
        source=f"{_PEAKS}; {_NVLINK}; power: as A100 40 GB SXM",
        notes="the A800 is the same with 200 GB/s of NVLink; the PCIe card has 1.94 TB/s and PCIe links"),
    Gpu(name="h100", title="H100 80 GB SXM", memory_gib=79.1, driver_memory_gib=79.65, bf16_tflops=989.0,
        fp8_tflops=1979.0, matmul_tflops=794.5, memory_bandwidth_tb_s=3.35, link="NVLink 4", link_gb_s=450.0,
        host_link_gb_s=PCIE5_GB_S, power_w=700, price_low_usd_h=1.99, price_high_usd_h=5.00, price_date="2026-05",
        price_source=_MERCATUS, source=f"{_PEAKS}; {_NVLINK}; {_HF}h100"),
    Gpu(name="h100_pcie", title="H100 80 GB PCIe", memory_gib=79.1, driver_memory_gib=79.65, bf16_tflops=756.0,
        fp8_tflops=1513.0, memory_bandwidth_tb_s=2.0, link_gb_s=PCIE5_GB_S, host_link_gb_s=PCIE5_GB_S, power_w=350,
        price_low_usd_h=1.99, price_high_usd_h=3.51, price_date="2026-03", price_source=_RUNPOD,
        source=f"{_PEAKS}; power: NVIDIA product brief PB-11133-001", notes="an NVLink bridge for pairs is optional"),
    Gpu(name="h200", title="H200 SXM", memory_gib=139.72, driver_memory_gib=140.4, bf16_tflops=989.0,
        fp8_tflops=1979.0, matmul_tflops=794.5, memory_bandwidth_tb_s=4.8, link="NVLink 4", link_gb_s=450.0,
        host_link_gb_s=PCIE5_GB_S, power_w=700, price_low_usd_h=2.50, price_high_usd_h=7.00, price_date="2026-05",
        price_source=_MERCATUS, source=f"{_PEAKS}; {_NVLINK}; {_HF}h200"),
    Gpu(name="h800", title="H800 SXM", memory_gib=79.1, driver_memory_gib=79.65, bf16_tflops=989.0, fp8_tflops=1979.0,
        memory_bandwidth_tb_s=3.35, link="NVLink 4, capped", link_gb_s=200.0, host_link_gb_s=PCIE5_GB_S, source=_PEAKS,
        notes="power unsourced; no price found; nanochat lists 756 TFLOP/s, which is the PCIe card"),
    Gpu(name="h20", title="H20 96 GB", memory_gib=95.0, driver_memory_gib=95.58, bf16_tflops=148.0, fp8_tflops=296.0,
        memory_bandwidth_tb_s=4.0, link="NVLink 4", link_gb_s=450.0, host_link_gb_s=PCIE5_GB_S, power_w=400,
        source=f"{_PEAKS}; {_HF}h20", notes="memory seen by torch is derived; no price found; a 141 GB card exists"),
    Gpu(name="b200", title="B200 SXM", memory_gib=178.35, driver_memory_gib=179.06, bf16_tflops=2250.0,
        fp8_tflops=4500.0, matmul_tflops=1745.0, memory_bandwidth_tb_s=8.0, link="NVLink 5", link_gb_s=900.0,
        host_link_gb_s=PCIE5_GB_S, power_w=1000, price_low_usd_h=5.50, price_high_usd_h=10.57, price_date="2026-03",
        price_source=f"{_RUNPOD}; the low end: SkyPilot catalog v8, Nebius", source=f"{_PEAKS}; {_NVLINK}",
        notes="power from tables in public repositories, not from the data sheet"),
    Gpu(name="gb200", title="GB200 NVL72", memory_gib=184.3, bf16_tflops=2500.0, fp8_tflops=5000.0,
        matmul_tflops=1822.0, memory_bandwidth_tb_s=8.0, link="NVLink 5, 72 GPUs", link_gb_s=900.0,
        host_link_gb_s=450.0, source=f"{_PEAKS}; {_NVLINK}",
        notes="memory is implied by torchtitan's percentages; host link (NVLink-C2C) unsourced; power unsourced; no "
              "price found"),
    Gpu(name="mi300x", title="Instinct MI300X", memory_gib=191.69, bf16_tflops=1307.0, fp8_tflops=2610.0,
        matmul_tflops=668.4, memory_bandwidth_tb_s=5.3, link="xGMI, 7 peers", link_gb_s=448.0,
        host_link_gb_s=PCIE5_GB_S, power_w=750, price_low_usd_h=1.50, price_high_usd_h=6.00, price_date="2026-05",
        price_source="cliffcenter.com: TensorWave to Azure and Oracle", source=f"{_PEAKS}; {_NVLINK}; power: MLPerf "
        "inference v4.1 system 8xMI300X_2xEPYC-9374F", notes="448 GB/s is the sum over 7 peers"),
    Gpu(name="mi325x", title="Instinct MI325X", memory_gib=255.69, bf16_tflops=1307.0, fp8_tflops=2610.0,
        matmul_tflops=784.9, memory_bandwidth_tb_s=6.0, link="xGMI, 7 peers", link_gb_s=448.0,
        host_link_gb_s=PCIE5_GB_S, price_low_usd_h=1.95, price_high_usd_h=2.50, price_date="2026-05",
        price_source="cliffcenter.com: TensorWave to its parity threshold", source=f"{_PEAKS}; {_NVLINK}",
        notes="448 GB/s is the sum over 7 peers; power unsourced"),
)
# fmt: on
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def gpu_of(name: str, memory_gib: float | None = None, price_usd_h: float | None = None) -> Gpu | None:
    """The GPU of `gpu.name`, with what the user says of it instead of the table's; None for auto.

    Raises:
        ConfigError: `other` without its memory.
    """
    if name == "auto":
        return None
    if name == "other" and memory_gib is None:
        raise ConfigError("gpu.memory_gib: must be given for gpu=other: what torch sees of its memory, in GiB")
    gpu = GPUS.get(name) or Gpu(name="other", title="other GPU", memory_gib=memory_gib, source="gpu.memory_gib")
    if memory_gib is not None:
        gpu = replace(gpu, memory_gib=memory_gib)
    if price_usd_h is not None:
        gpu = replace(gpu, price_low_usd_h=price_usd_h, price_high_usd_h=price_usd_h, price_date="now",
                      price_source="gpu.price_usd_h")
    return gpu
