//! `M`: the Mamba-2 mixer (Dao and Gu 2024, section 7), as in Megatron's `mamba_mixer.py`.
//!
//! ```text
//! [z | x | B | C | dt] = in_proj(RMSNorm(u))
//! [x | B | C] = silu(causal depthwise conv1d([x | B | C]))
//! dt = max(softplus(dt + dt_bias), mamba_dt_limit_min), A = -exp(A_log)
//! S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t     per head; heads of a group share B and C
//! out_proj(RMSNorm_groups(y * silu(z)) * weight)
//! ```

use crate::config::{Config, at_most, divides, needed, positive, within};
use crate::declare::{BlockDeclaration, hidden};
use crate::pattern::LayerKind;
use gantry_plugin_api::ops::{Act, GatedNorm, Role, SsdScan};
use gantry_plugin_api::plan::{Axis, Block, FootprintKind, Init, Layout};
use gantry_plugin_api::sdk::{Cx, Error, ParamId, Result, Tensor};

/// Taps that the host's convolution takes.
const MAX_CONV_WIDTH: usize = 8;

/// Sizes of Mamba layers.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub heads: usize,
    head_dim: usize,
    groups: usize,
    state: usize,
    conv_width: usize,
    scan: Scan,
    dt: Init,
}

/// Numbers that the forward pass needs besides parameters.
#[derive(Clone, Copy, Debug)]
struct Scan {
    chunk: usize,
    dt_min: f64,
    norm_eps: f64,
}

impl Sizes {
    pub fn new(config: &Config) -> Result<Sizes> {
        let heads = needed(config.mamba_num_heads, "mamba_num_heads", LayerKind::Mamba)?;
        let groups = positive(config.mamba_num_groups, "mamba_num_groups")?;
        divides(("mamba_num_groups", groups), ("mamba_num_heads", heads))?;
        let (low, high) = (config.mamba_dt_min, config.mamba_dt_max);
        let floor = within(config.mamba_dt_init_floor, "mamba_dt_init_floor", f64::MIN_POSITIVE..=f64::MAX)?;
        within(low, "mamba_dt_min", f64::MIN_POSITIVE..=f64::MAX)?;
        if low > high || !high.is_finite() {
            return Err(Error::config(format!(
                "config.mamba_dt_min = {low} is more than mamba_dt_max = {high}; swap or change them"
            )));
        }
        Ok(Sizes {
            heads,
            head_dim: positive(config.mamba_head_dim, "mamba_head_dim")?,
            groups,
            state: positive(config.mamba_state_dim, "mamba_state_dim")?,
            conv_width: at_most(
                positive(config.mamba_conv_width, "mamba_conv_width")?,
                "mamba_conv_width",
                MAX_CONV_WIDTH,
            )?,
            scan: Scan {
                chunk: positive(config.mamba_chunk_size, "mamba_chunk_size")?,
                dt_min: within(config.mamba_dt_limit_min, "mamba_dt_limit_min", 0.0..=f64::MAX)?,
                norm_eps: within(config.mamba_norm_epsilon, "mamba_norm_epsilon", f64::MIN_POSITIVE..=1.0)?,
            },
            dt: Init::InverseSoftplus { low, high, floor },
        })
    }

    pub fn axes(&self) -> [Axis; 2] {
        [
            Axis::new("mamba_groups", self.groups).tensor_parallel(),
            Axis::new("mamba_heads", self.heads).grouped_by("mamba_groups").tensor_parallel().elastic_per_layer(),
        ]
    }

    /// Arithmetic of the convolution, and of the scan in its recurrent form: decay, input and output of each state
    /// element. Kept for a sequence: the scan's state and the convolution's last inputs.
    pub fn block(&self, block: Block) -> Block {
        let (inner, bc) = (self.heads * self.head_dim, 2 * self.groups * self.state);
        let conv = 2.0 * self.conv_width as f64 * (inner + bc) as f64;
        let channels = Layout::axis("mamba_heads", self.head_dim);
        block
            .extra_flops(conv + 6.0 * inner as f64 * self.state as f64)
            .keeps(FootprintKind::PerSequence, [channels, Layout::Fixed(self.state)])
            .keeps(FootprintKind::PerSequence, [self.xbc(), Layout::Fixed(self.conv_width - 1)])
    }

    /// Channels that pass through the convolution.
    fn xbc(&self) -> Layout {
        let state = || Layout::axis("mamba_groups", self.state);
        Layout::seq([("x", Layout::axis("mamba_heads", self.head_dim)), ("B", state()), ("C", state())])
    }

    pub fn declare(&self, b: &mut BlockDeclaration<'_>) -> Mamba {
        let channels = || Layout::axis("mamba_heads", self.head_dim);
        let heads = || Layout::axis("mamba_heads", 1);
        let state = || Layout::axis("mamba_groups", self.state);
        let zxbcdt =
            Layout::seq([("z", channels()), ("x", channels()), ("B", state()), ("C", state()), ("dt", heads())]);
        let conv_channels = self.heads * self.head_dim + 2 * self.groups * self.state;
        // Of a depthwise convolution each output sees conv_width inputs.
        let bound = 1.0 / (self.conv_width as f64).sqrt();
        let conv = Init::Uniform { low: -bound, high: bound };
        let (normal, scaled) = (b.normal(), b.scaled());
        let width = self.conv_width;
        Mamba {
            norm: b.norm("mixer.in_proj.layer_norm_weight", "norm.weight"),
            in_proj: b.param("mixer.in_proj.weight", "mixer.in_proj.weight", [zxbcdt, hidden()], normal),
            conv_weight: b.param_with(
                "mixer.conv1d_weight",
                "mixer.conv1d.weight",
                [self.xbc(), Layout::Fixed(width)],
                conv,
                |p| p.exported_as([conv_channels, 1, width]),
            ),
            conv_bias: b.param("mixer.conv1d_bias", "mixer.conv1d.bias", [self.xbc()], conv),
            dt_bias: b.param_with("mixer.dt_bias", "mixer.dt_bias", [heads()], self.dt, |p| p.in_fp32()),
            a_log: b.param_with(
                "mixer.A_log",
                "mixer.A_log",
                [heads()],
                Init::LogUniform { low: 1.0, high: 16.0 },
                |p| p.in_fp32(),
            ),
            d: b.param_with("mixer.D", "mixer.D", [heads()], Init::Ones, |p| p.in_fp32()),
            gate_norm: b.param("mixer.norm.weight", "mixer.norm.weight", [channels()], Init::Ones),
            out_proj: b.param("mixer.out_proj.weight", "mixer.out_proj.weight", [hidden(), channels()], scaled),
            scan: self.scan,
        }
    }
}

/// Parameters of a Mamba layer.
#[derive(Clone, Copy, Debug)]
pub struct Mamba {
    norm: ParamId,
    in_proj: ParamId,
    conv_weight: ParamId,
    conv_bias: ParamId,
    dt_bias: ParamId,
    a_log: ParamId,
    d: ParamId,
    gate_norm: ParamId,
    out_proj: ParamId,
    scan: Scan,
}

impl Mamba {
    /// What the layer adds to the residual stream: x [tokens, hidden] to [tokens, hidden].
    pub fn forward(&self, cx: &Cx, x: Tensor, eps: f64) -> Result<Tensor> {
        let h = cx.rms_norm("mixer.in_proj.norm", x, self.norm, eps)?;
        let zxbcdt = cx.role(Role::InProjection, cx.linear("mixer.in_proj", h, self.in_proj)?)?;
        let [z, x, b, c, dt] = cx.split("mixer.split", zxbcdt)?;
        let xbc = cx.concat("mixer.xbc", &[x, b, c])?;
        let xbc = cx.causal_conv1d("mixer.conv1d", xbc, self.conv_weight, self.conv_bias, Act::Silu)?;
        let xbc = cx.role(Role::Convolution, xbc)?;
        let scan = SsdScan { chunk: self.scan.chunk as u64, dt_min: self.scan.dt_min };
        let y = cx.ssd_scan("mixer.scan", xbc, dt, self.a_log, self.d, self.dt_bias, scan)?;
        let y = cx.role(Role::MixerCore, y)?;
        let gate = GatedNorm { eps: self.scan.norm_eps, norm_before_gate: false };
        let y = cx.role(Role::GateNorm, cx.gated_norm("mixer.norm", y, z, self.gate_norm, gate)?)?;
        cx.linear("mixer.out_proj", y, self.out_proj)
    }
}
