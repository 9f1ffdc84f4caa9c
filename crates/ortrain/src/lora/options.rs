//! Options of adapters, and descriptions of adapted layers.

use ortrain_ops::training::{AdapterTarget, LayerKind, WeightFormat, is_adapter_name};

use crate::{Error, Result};

/// Selection of the weights that get adapters.
///
/// ```
/// use ortrain::lora::Targets;
///
/// assert_eq!(Targets::patterns(["q_proj", "*.v_proj.weight"]).list().len(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Targets {
    /// All linear layers but the head.
    #[default]
    Auto,
    /// Patterns (`*`, `?`, `[...]`) of names of weights, nodes or modules. The last parts of a name are a pattern of it,
    /// as in PEFT's `target_modules`.
    Patterns(Vec<String>),
}

impl Targets {
    /// Returns a selection by patterns.
    ///
    /// ```
    /// use ortrain::lora::Targets;
    ///
    /// assert_eq!(Targets::patterns(["fc1"]), Targets::Patterns(vec!["fc1".into()]));
    /// ```
    #[must_use]
    pub fn patterns<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Targets {
        Targets::Patterns(patterns.into_iter().map(Into::into).collect())
    }

    /// Returns the patterns; none for [`Targets::Auto`].
    #[must_use]
    pub fn list(&self) -> &[String] {
        match self {
            Targets::Auto => &[],
            Targets::Patterns(list) => list,
        }
    }
}

/// Initial values of the factors. In all of them the model gives the same results as before, but for rounding errors of
/// the methods that change the base.
///
/// ```
/// use ortrain::lora::Init;
///
/// assert_eq!(Init::from_name("gaussian"), Some(Init::Gaussian));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Init {
    /// `A` is uniform from `-1 / sqrt(n)` to `1 / sqrt(n)` for `n` inputs (PEFT's default), and `B` is zero.
    #[default]
    Kaiming,
    /// `A` is normal with the standard deviation `1 / rank`, and `B` is zero.
    Gaussian,
    /// The product of the factors is the part of the weight with the largest singular values, and the weight in the model
    /// becomes the rest. (F. Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
    /// Language Models", 2024.)
    Pissa,
    /// `B` and `A` are the first columns of `Q` and rows of `R` of the weight, and the weight in the model becomes the
    /// rest. (K. Büyükakyüz, "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models", 2024.)
    Olora,
}

impl Init {
    /// Returns the method of a name.
    ///
    /// ```
    /// use ortrain::lora::Init;
    ///
    /// assert_eq!(Init::from_name("kaiming"), Some(Init::Kaiming));
    /// assert_eq!(Init::from_name("zeros"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Init> {
        match name {
            "kaiming" => Some(Init::Kaiming),
            "gaussian" => Some(Init::Gaussian),
            "pissa" => Some(Init::Pissa),
            "olora" => Some(Init::Olora),
            _ => None,
        }
    }

    /// Returns the name of the method.
    ///
    /// ```
    /// use ortrain::lora::Init;
    ///
    /// assert_eq!(Init::Pissa.name(), "pissa");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Init::Kaiming => "kaiming",
            Init::Gaussian => "gaussian",
            Init::Pissa => "pissa",
            Init::Olora => "olora",
        }
    }

    /// Returns true for methods that change the weights of the model.
    ///
    /// ```
    /// use ortrain::lora::Init;
    ///
    /// assert!(Init::Olora.changes_base() && !Init::Kaiming.changes_base());
    /// ```
    #[must_use]
    pub fn changes_base(self) -> bool {
        matches!(self, Init::Pissa | Init::Olora)
    }
}

/// Biases that are trained beside an adapter, as in PEFT.
///
/// ```
/// use ortrain::lora::Bias;
///
/// assert_eq!(Bias::from_name("lora_only"), Some(Bias::LoraOnly));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bias {
    /// No biases.
    #[default]
    None,
    /// Biases of all layers, and all other parameters with the name `bias`.
    All,
    /// Biases of the adapted layers.
    LoraOnly,
}

impl Bias {
    /// Returns the selection of a name.
    ///
    /// ```
    /// use ortrain::lora::Bias;
    ///
    /// assert_eq!(Bias::from_name("all"), Some(Bias::All));
    /// assert_eq!(Bias::from_name("some"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Bias> {
        [Bias::None, Bias::All, Bias::LoraOnly].into_iter().find(|bias| bias.name() == name)
    }

    /// Returns the name of the selection.
    ///
    /// ```
    /// use ortrain::lora::Bias;
    ///
    /// assert_eq!(Bias::None.name(), "none");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Bias::None => "none",
            Bias::All => "all",
            Bias::LoraOnly => "lora_only",
        }
    }
}

/// Form of the adapted weights of linear layers.
///
/// ```
/// use ortrain::lora::Base;
///
/// assert_eq!(Base::from_name("int4"), Some(Base::Int4));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Base {
    /// As they are.
    #[default]
    Keep,
    /// Integers of 8 bits with a scale for each output (`DequantizeLinear`).
    Int8,
    /// Integers of 4 bits in blocks of 32 (`MatMulNBits`).
    Int4,
    /// 4-bit normal floats in blocks of 64 (`MatMulBnb4`).
    Nf4,
}

impl Base {
    /// Returns the form of a name.
    ///
    /// ```
    /// use ortrain::lora::Base;
    ///
    /// assert_eq!(Base::from_name("keep"), Some(Base::Keep));
    /// assert_eq!(Base::from_name("int2"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Base> {
        match name {
            "keep" => Some(Base::Keep),
            "int8" => Some(Base::Int8),
            "int4" => Some(Base::Int4),
            "nf4" => Some(Base::Nf4),
            _ => None,
        }
    }

    /// Returns the format of quantized weights; `None` for weights as they are.
    pub(super) fn format(self) -> Option<WeightFormat> {
        match self {
            Base::Keep => None,
            Base::Int8 => Some(WeightFormat::Int8),
            Base::Int4 => Some(WeightFormat::Int4),
            Base::Nf4 => Some(WeightFormat::Nf4),
        }
    }
}

/// Options of [`add`](super::add).
///
/// ```
/// use ortrain::lora::LoraOptions;
///
/// let options = LoraOptions { rank: 16, alpha: Some(32.0), ..LoraOptions::default() };
/// assert_eq!(options.scale(), 2.0);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    /// Rank: the number of rows of `A` and of columns of `B`.
    pub rank: usize,
    /// Numerator of the scale; by default the rank.
    pub alpha: Option<f64>,
    /// Selected weights.
    pub targets: Targets,
    /// Patterns of weights, nodes or modules that get no adapter.
    pub exclude: Vec<String>,
    /// Share of the inputs of the adapters that a training step sets to zero, from 0 to less than 1.
    pub dropout: f64,
    /// Initial values.
    pub init: Init,
    /// True to divide alpha by the root of the rank instead of the rank. (D. Kalajdzievski, "A Rank Stabilization
    /// Scaling Factor for Fine-Tuning with LoRA", 2023.)
    pub use_rslora: bool,
    /// True to train the length of each row of the adapted weights, too. (S.-Y. Liu et al., "DoRA: Weight-Decomposed
    /// Low-Rank Adaptation", 2024.)
    pub use_dora: bool,
    /// Biases that are trained beside the adapter.
    pub bias: Bias,
    /// Patterns of constants that are trained beside the adapters.
    pub train_also: Vec<String>,
    /// Form of the adapted weights of linear layers.
    pub base: Base,
    /// Name of the adapter: letters, digits, `_` and `-`.
    pub name: String,
    /// Seed of the initial values.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> LoraOptions {
        LoraOptions {
            rank: 8,
            alpha: None,
            targets: Targets::Auto,
            exclude: Vec::new(),
            dropout: 0.0,
            init: Init::Kaiming,
            use_rslora: false,
            use_dora: false,
            bias: Bias::None,
            train_also: Vec::new(),
            base: Base::Keep,
            name: "default".into(),
            seed: 0,
        }
    }
}

impl LoraOptions {
    /// Returns the factor of the product of `A` and `B`.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        let alpha = self.alpha.unwrap_or(rank);
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    pub(super) fn check(&self) -> Result<()> {
        let fail = |text: String| Err(Error::Argument(text));
        if self.rank == 0 {
            return fail("the rank of an adapter must be at least 1, got 0".into());
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return fail(format!("dropout must be from 0 to less than 1, got {}", self.dropout));
        }
        if let Some(alpha) = self.alpha.filter(|alpha| !(*alpha as f32).is_finite()) {
            return fail(format!("alpha must be a finite float32, got {alpha}"));
        }
        if self.use_dora && self.dropout > 0.0 {
            return fail("use_dora with dropout is not supported; choose one of both".into());
        }
        if self.use_dora && self.base != Base::Keep {
            return fail("use_dora needs weights of floats; use the base \"keep\"".into());
        }
        if !is_adapter_name(&self.name) {
            return fail(format!(
                "the name of an adapter consists of letters, digits, \"_\" and \"-\", got {:?}",
                self.name
            ));
        }
        Ok(())
    }
}

/// Adapter of one layer.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, Targets, add};
///
/// let options = LoraOptions { rank: 2, targets: Targets::patterns(["fc2"]), ..LoraOptions::default() };
/// let (_, description) = add(setup::MODEL.into(), &options)?;
/// let layer = &description.layers[0];
/// assert_eq!((layer.weight.as_str(), layer.kind, layer.rank), ("fc2.weight", "linear", 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerAdapter {
    /// Name of the adapter.
    pub adapter: String,
    /// Name of the weight.
    pub weight: String,
    /// Name of the node.
    pub node: String,
    /// Kind of the layer: `linear`, `embedding`, `convolution` or `recurrent`.
    pub kind: &'static str,
    /// Number of input features, or of rows of a table.
    pub inputs: usize,
    /// Number of output features, or of columns of a table.
    pub outputs: usize,
    /// Rank.
    pub rank: usize,
    /// Number of trained elements.
    pub parameters: usize,
    /// Bytes of the trained elements.
    pub bytes: usize,
}

impl LayerAdapter {
    pub(super) fn new(target: &AdapterTarget, adapter: &str, rank: usize, parameters: usize) -> LayerAdapter {
        LayerAdapter {
            adapter: adapter.to_owned(),
            weight: target.weight.clone(),
            node: target.node_name.clone(),
            kind: LayerKind::name(target.kind),
            inputs: target.inputs,
            outputs: target.outputs,
            rank,
            parameters,
            bytes: parameters * target.dtype.size(),
        }
    }
}

/// Adapted layers of a model, in the order of the nodes. Layers that share a weight share its factors.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, Targets, add};
///
/// let options = LoraOptions { rank: 2, targets: Targets::patterns(["fc*"]), ..LoraOptions::default() };
/// let (_, description) = add(setup::MODEL.into(), &options)?;
/// assert_eq!(description.parameters(), description.layers.iter().map(|layer| layer.parameters).sum::<usize>());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// Layers.
    pub layers: Vec<LayerAdapter>,
}

impl Description {
    /// Returns the number of elements of all factors. Shared factors count once.
    #[must_use]
    pub fn parameters(&self) -> usize {
        let is_first = |at: usize| {
            let layer = &self.layers[at];
            !self.layers[..at]
                .iter()
                .any(|other| other.weight == layer.weight && other.adapter == layer.adapter)
        };
        (0..self.layers.len()).filter(|&at| is_first(at)).map(|at| self.layers[at].parameters).sum()
    }
}
