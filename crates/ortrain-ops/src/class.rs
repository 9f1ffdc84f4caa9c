//! Classes and traits of operators. Analyses of graphs use them instead of operator names.

/// Class of an operator: the function that it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Class {
    /// None of the other classes.
    #[default]
    Other,
    /// `a + b`.
    Add,
    /// `a - b`.
    Subtract,
    /// `a * b`, element by element.
    Multiply,
    /// `a / b`.
    Divide,
    /// `a` to the power of `b`.
    Power,
    /// Square root.
    Root,
    /// Natural logarithm.
    Logarithm,
    /// `1 / x`.
    Reciprocal,
    /// `-x`.
    Negate,
    /// Sine or cosine.
    Sine,
    /// Product of matrices.
    MatrixProduct,
    /// Product of matrices with scaling and transposition: `FusedMatMul`.
    ScaledProduct,
    /// Product of matrices with a bias: `Gemm`.
    AffineProduct,
    /// Product with a matrix of packed integers.
    PackedProduct,
    /// Sum of products over indices: `Einsum`.
    Contraction,
    /// Convolution.
    Convolution,
    /// Gradient of a convolution as an operator of models: `ConvTranspose`.
    TransposedConvolution,
    /// Normalization with a learned scale and bias.
    Normalization {
        /// Index of the scale.
        scale: usize,
        /// Index of the bias, if the operator has a bias.
        bias: Option<usize>,
        /// True if each channel of each sample is normalized by itself.
        of_instances: bool,
    },
    /// Recurrent layer.
    Recurrent {
        /// Inputs with initial states.
        states: &'static [usize],
    },
    /// Probabilities of classes, or their logarithms.
    Softmax {
        /// True for logarithms.
        log: bool,
    },
    /// Numbers from 0 to 1, each for itself.
    Sigmoid {
        /// True for the function in pieces: `HardSigmoid`.
        hard: bool,
    },
    /// Division of rows by a norm, of `ai.onnx.ml`.
    RowNorm,
    /// Position of an extreme, without a gradient.
    Choice,
    /// The largest or smallest elements, with their positions.
    TopK,
    /// Selection of elements by a condition: `Where`.
    Selection,
    /// The shape of a tensor.
    Shape,
    /// The number of elements of a tensor.
    Size,
    /// Numbers at equal distances: `Range`.
    Positions,
    /// Slices by index: `Gather`.
    Lookup,
    /// Tensors joined along an axis.
    Join,
    /// Another order of the axes.
    Transpose,
    /// Another shape of the same elements: `Reshape`.
    Reshape,
    /// The same elements in two axes: `Flatten`.
    Flatten,
    /// New axes of size 1: `Unsqueeze`.
    Unsqueeze,
    /// Repetition along axes of size 1: `Expand`.
    Expand,
    /// A tensor of equal elements, from a shape.
    Fill,
    /// Border of equal elements: `Pad`.
    Pad,
    /// Another element type: `Cast`.
    Cast,
    /// The same tensor: `Identity`.
    Copy,
    /// Sum over axes: `ReduceSum`.
    AxisSum,
    /// Values written into a part of another tensor.
    Write {
        /// Inputs that exporters fill with one number.
        filled: &'static [usize],
    },
    /// Loss of class labels, from logits or logarithms of probabilities.
    LabelLoss {
        /// True for logits.
        of_logits: bool,
    },
    /// Gradient of a loss of class labels, with respect to logits.
    LogitGradient,
    /// A constant of the model.
    Constant,
    /// Dropout.
    Dropout,
    /// Map from names of classes to probabilities, of `ai.onnx.ml`.
    Map,
    /// Step of an optimizer over lists of parameters and gradients.
    OptimizerStep {
        /// Number of lists of moments that optimizer models have for the operator.
        moments: usize,
    },
    /// Scaling of gradients by their norm.
    GradientClip,
    /// Floats rounded to a grid of integers: its integer results pass a gradient.
    Quantization,
    /// Integers of a grid as floats.
    Dequantization,
}

impl Class {
    /// Returns true for a sum, difference, product or quotient of two values.
    #[must_use]
    pub fn is_arithmetic(self) -> bool {
        matches!(self, Class::Add | Class::Subtract | Class::Multiply | Class::Divide)
    }

    /// Returns true for products of matrices in any form.
    #[must_use]
    pub fn is_product(self) -> bool {
        matches!(
            self,
            Class::MatrixProduct | Class::ScaledProduct | Class::AffineProduct | Class::Contraction
        )
    }
}

/// Set of properties that several classes share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traits(u16);

impl Traits {
    /// No property.
    pub const NONE: Traits = Traits(0);
    /// Passes the elements of the first input through, possibly with another shape, type or order, or only some of them.
    pub const MOVES: Traits = Traits(1);
    /// Further inputs than the first one determine only type or shape.
    pub const SHAPED_BY_INPUTS: Traits = Traits(1 << 1);
    /// Prepares an input of a model before its first layer, in addition to arithmetic and moves.
    pub const PREPARES: Traits = Traits(1 << 2);
    /// The inputs broadcast to each other.
    pub const BROADCASTS: Traits = Traits(1 << 3);
    /// Changes only the shape, type or bounds of its first input: a check of scores looks through.
    pub const KEEPS_SCORES: Traits = Traits(1 << 4);
    /// Results have no bounds and are no logarithms of probabilities.
    pub const UNBOUNDED: Traits = Traits(1 << 5);
    /// Returns a part of its first input, or changes the shape or type.
    pub const TAKES_PARTS: Traits = Traits(1 << 6);
    /// A decision without bounds stays one.
    pub const KEEPS_DECISION: Traits = Traits(1 << 7);
    /// May follow the head of a classifier, and keeps the axis of the classes.
    pub const FOLLOWS_HEAD: Traits = Traits(1 << 8);
    /// Computes a loss, which stays float32 in a model that computes in narrow floats.
    pub const COMPUTES_LOSS: Traits = Traits(1 << 9);
    /// Reads class labels, and reports a label out of range.
    pub const READS_LABELS: Traits = Traits(1 << 10);
    /// The derivative is zero almost everywhere.
    pub const ZERO_DERIVATIVE: Traits = Traits(1 << 11);
    /// Passes the gradient of quantized tensors through their integers.
    pub const PASSES_QUANTIZED: Traits = Traits(1 << 12);
    /// Returns every element of the first input, in the same order.
    pub const KEEPS_ELEMENTS: Traits = Traits::MOVES
        .and(Traits::KEEPS_SCORES)
        .and(Traits::TAKES_PARTS)
        .and(Traits::KEEPS_DECISION)
        .and(Traits::FOLLOWS_HEAD);

    /// Returns the properties of both sets.
    #[must_use]
    pub const fn and(self, other: Traits) -> Traits {
        Traits(self.0 | other.0)
    }

    /// Returns true if the set has all properties of another set.
    #[must_use]
    pub const fn has(self, other: Traits) -> bool {
        self.0 & other.0 == other.0
    }
}
