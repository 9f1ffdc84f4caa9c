//! Settings of a training in one session.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ortrain_graph::{DType, Tensor};

/// Settings of a [`TrainingSession`](super::TrainingSession).
///
/// ```
/// use ortrain::classic::TrainingParameters;
///
/// let parameters = TrainingParameters::new("loss").optimizer("AdamOptimizer").train(["fc2.weight"]);
/// assert_eq!(parameters.lr_params_feed_name, "Learning_Rate");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingParameters {
    /// Value to minimize: any value of the model with one element.
    pub loss_output_name: String,
    /// Trained initializers; if empty, all that the loss depends on.
    pub weights_to_train: BTreeSet<String>,
    /// Initializers that are never trained; overrides all other settings.
    pub weights_not_to_train: BTreeSet<String>,
    /// By operator: input indices and scalar values that are not trained, if `weights_to_train` is empty.
    pub immutable_weights: BTreeMap<String, Vec<(i64, f32)>>,
    /// `SGDOptimizer`, `AdamOptimizer`, `LambOptimizer`, or empty: then only gradients are computed.
    pub training_optimizer_name: String,
    /// Name of the learning-rate input.
    pub lr_params_feed_name: String,
    /// Float settings of the optimizer for each trained weight, by name. Each weight requires an entry.
    pub optimizer_attributes_map: BTreeMap<String, BTreeMap<String, f32>>,
    /// Integer settings of the optimizer for each trained weight.
    pub optimizer_int_attributes_map: BTreeMap<String, BTreeMap<String, i64>>,
    /// Type of the model's computation, if it differs from the type of the weights; see
    /// [`TrainingParameters::mixed_precision`].
    pub mixed_precision: Option<DType>,
    /// Number of runs per update. The update uses the mean of their gradients.
    pub gradient_accumulation_steps: i64,
    /// True to compute the norm of all gradients together, and to clip gradients by it.
    pub enable_grad_norm_clip: bool,
    /// True to make the gradient of each weight an output.
    pub set_gradients_as_graph_outputs: bool,
    /// Output file of the transformed model, before gradients are added.
    pub model_after_graph_transforms_path: Option<PathBuf>,
    /// Output file of the model with its gradients.
    pub model_with_gradient_graph_path: Option<PathBuf>,
    /// Output file of the model with its gradients and the updates of the weights.
    pub model_with_training_graph_path: Option<PathBuf>,
    /// Initial optimizer state of each weight, by name: `Moment_1`, `Moment_2`, `Update_Count`. LAMB has
    /// `Step` under `shared_optimizer_state`.
    pub initial_optimizer_state: BTreeMap<String, BTreeMap<String, Tensor>>,
}

impl Default for TrainingParameters {
    fn default() -> TrainingParameters {
        TrainingParameters {
            loss_output_name: String::new(),
            weights_to_train: BTreeSet::new(),
            weights_not_to_train: BTreeSet::new(),
            immutable_weights: BTreeMap::new(),
            training_optimizer_name: String::new(),
            lr_params_feed_name: "Learning_Rate".into(),
            optimizer_attributes_map: BTreeMap::new(),
            optimizer_int_attributes_map: BTreeMap::new(),
            mixed_precision: None,
            gradient_accumulation_steps: 1,
            enable_grad_norm_clip: true,
            set_gradients_as_graph_outputs: false,
            model_after_graph_transforms_path: None,
            model_with_gradient_graph_path: None,
            model_with_training_graph_path: None,
            initial_optimizer_state: BTreeMap::new(),
        }
    }
}

impl TrainingParameters {
    /// Creates settings with this value as the loss.
    ///
    /// ```
    /// use ortrain::classic::TrainingParameters;
    ///
    /// assert_eq!(TrainingParameters::new("loss").gradient_accumulation_steps, 1);
    /// ```
    #[must_use]
    pub fn new(loss: &str) -> TrainingParameters {
        TrainingParameters { loss_output_name: loss.into(), ..TrainingParameters::default() }
    }

    /// Adds trained weights with the default settings of the optimizer.
    ///
    /// ```
    /// use ortrain::classic::TrainingParameters;
    ///
    /// let parameters = TrainingParameters::new("loss").train(["w", "b"]);
    /// assert!(parameters.optimizer_attributes_map["w"].is_empty());
    /// ```
    #[must_use]
    pub fn train<'a>(mut self, weights: impl IntoIterator<Item = &'a str>) -> TrainingParameters {
        for weight in weights {
            self.weights_to_train.insert(weight.into());
            self.optimizer_attributes_map.entry(weight.into()).or_default();
            self.optimizer_int_attributes_map.entry(weight.into()).or_default();
        }
        self
    }

    /// Sets the optimizer.
    #[must_use]
    pub fn optimizer(mut self, name: &str) -> TrainingParameters {
        self.training_optimizer_name = name.into();
        self
    }

    /// Computes the model in float16 or bfloat16, except for its loss. Weights remain float32. A run requires
    /// the loss scale, `loss_scale`, and changes nothing if the gradients are not finite.
    #[must_use]
    pub fn mixed_precision(mut self, dtype: DType) -> TrainingParameters {
        self.mixed_precision = Some(dtype);
        self
    }
}
