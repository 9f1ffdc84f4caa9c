//! Report about the first NaN or infinity of a step.

use std::fmt;

/// A NaN or an infinity that a step produced, and its origin: see
/// [`ModuleOptions::detect_anomaly`](crate::ModuleOptions::detect_anomaly).
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// # let mut state = ortrain::CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
/// # let train = ortrain::ModelSource::from_proto(&artifacts.training_model)?;
/// use ortrain::{Error, InputView, Module, ModuleOptions, Tensor};
///
/// let mut module = Module::new(train, &mut state, None, ModuleOptions::default().detect_anomaly(true))?;
/// let (x, labels) = (Tensor::f32(&[1, 64], &[f32::INFINITY; 64]), Tensor::i64(&[1], &[3]));
/// let result = module.train_step(&mut state, &[InputView::from(&x), InputView::from(&labels)], &mut |_, _| Ok(()));
/// let Err(Error::Anomaly(anomaly)) = result else { panic!("the input is infinite") };
/// let first = &anomaly.path[0];
/// assert_eq!((first.node.as_deref(), first.tensor.as_str(), first.index.as_slice()), (None, "x", &[0, 0][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Anomaly {
    /// The value found after the step: the loss, a gradient, or another result. Its `tensor` is a part of a
    /// sentence.
    pub finding: NotFinite,
    /// Origin: the first tensor with a NaN or infinity, then the first with NaN, if that is another tensor.
    /// Empty if the second run of the step, node by node, produced neither.
    pub path: Vec<NotFinite>,
}

/// A tensor with an element that is NaN or infinite.
///
/// ```
/// # fn first(anomaly: &ortrain::Anomaly) {
/// let ortrain::NotFinite { tensor, index, value, .. } = &anomaly.finding;
/// println!("{tensor:?} has {value} at {index:?}");
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NotFinite {
    /// The node that computed the tensor, as messages name it; `None` for an input of the step.
    pub node: Option<String>,
    /// True if the node belongs to the backward pass.
    pub backward: bool,
    /// The tensor.
    pub tensor: String,
    /// Index of the first such element, by axis.
    pub index: Vec<usize>,
    /// The element.
    pub value: f64,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { tensor, index, value, .. } = &self.finding;
        write!(f, "the step computed {value} in {tensor}")?;
        if !index.is_empty() {
            write!(f, " at {index:?}")?;
        }
        if self.path.is_empty() {
            write!(f, ", but running it again node by node did not reproduce it")?;
        }
        for (at, NotFinite { node, backward, tensor, index, value }) in self.path.iter().enumerate() {
            write!(f, "{}", if at == 0 { ": " } else { "; from it, " })?;
            match (node, at) {
                (None, _) => write!(f, "{tensor:?}, an input of the step, has {value} at {index:?}")?,
                (Some(node), _) => {
                    let pass = if *backward { "backward" } else { "forward" };
                    let verb = if at == 0 { "computes the first" } else { "computes" };
                    write!(f, "{node} of the {pass} pass {verb} {value}, at {index:?} of {tensor:?}")?;
                }
            }
        }
        write!(f, "; the state is as it was before the step")
    }
}
