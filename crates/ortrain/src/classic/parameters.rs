//! The settings of a training in one session.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ortrain_graph::{DType, Tensor};

/// The settings of a [`TrainingSession`](super::TrainingSession).
///
/// ```
/// use ortrain::classic::TrainingParameters;
///
/// let parameters = TrainingParameters::new("loss").optimizer("AdamOptimizer").train(["fc2.weight"]);
/// assert_eq!(parameters.lr_params_feed_name, "Learning_Rate");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingParameters {
    /// The value that is made smaller: any result of the model with one element.
    pub loss_output_name: String,
    /// Initializers that are trained; all that the loss is computed from, if there are none.
    pub weights_to_train: BTreeSet<String>,
    /// Initializers that are not trained, whatever else says so.
    pub weights_not_to_train: BTreeSet<String>,
    /// Inputs of operators, and values of scalars that are not trained there, where nothing is chosen.
    pub immutable_weights: BTreeMap<String, Vec<(i64, f32)>>,
    /// `SGDOptimizer`, `AdamOptimizer`, `LambOptimizer`, or nothing: then gradients alone are computed.
    pub training_optimizer_name: String,
    /// The name of the input with the learning rate.
    pub lr_params_feed_name: String,
    /// Settings of the optimizer for each trained weight, by their names; there is an entry for each.
    pub optimizer_attributes_map: BTreeMap<String, BTreeMap<String, f32>>,
    /// The same of settings that are integers.
    pub optimizer_int_attributes_map: BTreeMap<String, BTreeMap<String, i64>>,
    /// The type that the model computes in, where it is another than the weights have; see
    /// [`TrainingParameters::mixed_precision`].
    pub mixed_precision: Option<DType>,
    /// Runs whose gradients are summed for one update, which takes their mean.
    pub gradient_accumulation_steps: i64,
    /// True if the norm of all gradients together is computed, and gradients are clipped by it.
    pub enable_grad_norm_clip: bool,
    /// True if the gradient of each weight is an output.
    pub set_gradients_as_graph_outputs: bool,
    /// A file for the model as it is trained, before gradients are added.
    pub model_after_graph_transforms_path: Option<PathBuf>,
    /// A file for the model with its gradients.
    pub model_with_gradient_graph_path: Option<PathBuf>,
    /// A file for the model with its gradients and the updates of the weights.
    pub model_with_training_graph_path: Option<PathBuf>,
    /// The state of the optimizer for each weight, by names: `Moment_1`, `Moment_2`, `Update_Count`; of LAMB `Step` under
    /// `shared_optimizer_state`.
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
    /// With this value as the loss.
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

    /// With these weights, which have the settings that are the optimizer's own.
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

    /// With this optimizer.
    ///
    /// ```
    /// use ortrain::classic::TrainingParameters;
    ///
    /// let parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer");
    /// assert_eq!(parameters.training_optimizer_name, "SGDOptimizer");
    /// ```
    #[must_use]
    pub fn optimizer(mut self, name: &str) -> TrainingParameters {
        self.training_optimizer_name = name.into();
        self
    }

    /// With a model that computes in float16 or bfloat16, but for its loss. Weights stay float32. A run is given the factor
    /// of the loss, `loss_scale`, and changes nothing if the gradients are not finite.
    ///
    /// ```
    /// use ortrain::DType;
    /// use ortrain::classic::TrainingParameters;
    ///
    /// let parameters = TrainingParameters::new("loss").mixed_precision(DType::F16);
    /// assert_eq!(parameters.mixed_precision, Some(DType::F16));
    /// ```
    #[must_use]
    pub fn mixed_precision(mut self, dtype: DType) -> TrainingParameters {
        self.mixed_precision = Some(dtype);
        self
    }
}
