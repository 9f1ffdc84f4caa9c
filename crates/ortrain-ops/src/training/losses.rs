//! Losses as nodes after a model.

use ortrain_graph::{DType, Dim, Shape, Tensor, ValueType, declared_value_type, tensor_to_proto};
use ortrain_onnx::GraphProto;

use super::{GraphAppender, NameGenerator, declare_value, int_attribute, ints_attribute, text_attribute};
use crate::Error;

/// Loss that can be appended to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// Squared differences.
    MSELoss,
    /// Cross-entropy of the softmax along the class axis, with integer labels.
    CrossEntropyLoss,
    /// Binary cross-entropy of the sigmoid.
    BCEWithLogitsLoss,
    /// Absolute differences.
    L1Loss,
}

impl Loss {
    pub(super) fn label(self) -> &'static str {
        match self {
            Loss::MSELoss => "the squared error",
            Loss::CrossEntropyLoss => "the cross-entropy loss",
            Loss::BCEWithLogitsLoss => "the binary cross-entropy loss",
            Loss::L1Loss => "the absolute error",
        }
    }
}

/// Reduction of the losses of all elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Mean; for class labels the mean weighted by class.
    #[default]
    Mean,
    /// Sum.
    Sum,
    /// No reduction.
    None,
}

impl Reduction {
    /// Returns the name in ONNX and PyTorch.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Mean => "mean",
            Reduction::Sum => "sum",
            Reduction::None => "none",
        }
    }

    /// Returns the reduction of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Reduction> {
        [Reduction::Mean, Reduction::Sum, Reduction::None].into_iter().find(|known| known.name() == name)
    }
}

/// Settings of a loss. The default sets no options.
#[derive(Clone, Debug, Default)]
pub struct LossSettings {
    /// Reduction of the losses of all elements.
    pub reduction: Reduction,
    /// For [`Loss::CrossEntropyLoss`]: a factor for the losses of each class. For [`Loss::BCEWithLogitsLoss`]: factors
    /// of the losses, broadcast to their shape.
    pub weight: Option<Tensor>,
    /// For [`Loss::BCEWithLogitsLoss`]: factors of the losses of positive targets, broadcast.
    pub pos_weight: Option<Tensor>,
    /// For [`Loss::CrossEntropyLoss`]: a label with zero loss.
    pub ignore_index: Option<i64>,
    /// For [`Loss::CrossEntropyLoss`]: the class axis, from the end if negative. `None` is axis 1, as in ONNX.
    pub class_axis: Option<i64>,
    /// For [`Loss::CrossEntropyLoss`]: the fraction of the target, from 0 to 1, that is distributed evenly over all
    /// classes.
    pub label_smoothing: f32,
    /// Input with a float for each row, which multiplies the loss of the row. It is created if it does not exist. A
    /// mean divides by the same number as without it.
    pub sample_weight: Option<String>,
    /// For [`Loss::BCEWithLogitsLoss`]: true for the formula by `Softplus`, which is finite for all logits. The default
    /// is the formula of onnxruntime-training, which is not finite from logits of about 17 on.
    pub stable: bool,
    /// For [`Loss::CrossEntropyLoss`]: true if the target has a probability for each class instead of a label.
    pub soft: bool,
}

impl LossSettings {
    /// Returns the class axis of these scores.
    fn resolve_class_axis(&self, scores: &str, ty: &ValueType) -> Result<usize, Error> {
        let Some(shape) = ty.shape() else {
            return match self.class_axis {
                None | Some(1) => Ok(1),
                Some(axis) => Err(Error::Loss(format!(
                    "class_axis is {axis}, but the rank of {scores:?} is not known; declare its shape in the model"
                ))),
            };
        };
        let rank = shape.rank();
        if rank < 2 {
            return Err(Error::Loss(format!(
                "cross-entropy needs scores with a batch axis and a class axis, but {scores:?} is {ty}"
            )));
        }
        let axis = self.class_axis.unwrap_or(1);
        match usize::try_from(if axis < 0 { axis.saturating_add(rank as i64) } else { axis }) {
            Ok(0) => Err(Error::Loss(format!(
                "class_axis is {axis}, which is the batch axis of {scores:?} ({ty}); choose a later axis"
            ))),
            Ok(found) if found < rank => Ok(found),
            _ => Err(Error::Loss(format!(
                "class_axis is {axis}, but {scores:?} ({ty}) has axes 0 to {}",
                rank - 1
            ))),
        }
    }

    /// Checks that the loss supports the options.
    fn check(&self, loss: Loss) -> Result<(), Error> {
        let (weighted, binary, classes) = match loss {
            Loss::CrossEntropyLoss => (true, false, true),
            Loss::BCEWithLogitsLoss => (true, true, false),
            Loss::MSELoss | Loss::L1Loss => (false, false, false),
        };
        let settings_in_use = [
            ("weight", self.weight.is_some(), weighted),
            ("pos_weight", self.pos_weight.is_some(), binary),
            ("ignore_index", self.ignore_index.is_some(), classes),
            ("class_axis", self.class_axis.is_some(), classes),
            ("label_smoothing", self.label_smoothing != 0.0, classes),
            ("stable", self.stable, binary),
            ("soft", self.soft, classes),
        ];
        if let Some((name, ..)) = settings_in_use.iter().find(|(_, is_set, known)| *is_set && !known) {
            return Err(Error::Loss(format!("{} has no {name}", loss.label())));
        }
        if let Some((name, ..)) = settings_in_use[..5]
            .iter()
            .find(|(name, is_set, _)| self.soft && *is_set && *name != "class_axis")
        {
            return Err(Error::Loss(format!("{} of probabilities (soft) has no {name}", loss.label())));
        }
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let message = format!("label_smoothing must be from 0 to 1, got {}", self.label_smoothing);
            return Err(Error::Loss(message));
        }
        if let (Loss::CrossEntropyLoss, Some(weight)) = (loss, &self.weight)
            && weight.dims().len() != 1
        {
            let message = format!(
                "weight has shape {:?}, expected a vector with one element for each class",
                weight.dims()
            );
            return Err(Error::Loss(message));
        }
        Ok(())
    }
}

/// Loss with its inputs, and its factor in the sum.
#[derive(Clone, Debug)]
pub struct LossTerm {
    /// Kind of loss.
    pub loss: Loss,
    /// Settings of the loss.
    pub settings: LossSettings,
    /// Value to compare; `None` for one of the model's outputs.
    pub scores: Option<String>,
    /// Value to compare with. If it is `None`, or if there is no such value, it becomes a new input: `target`, or
    /// `labels` for class labels. With several terms that have scores of their own, the input is `target_SCORES` or
    /// `labels_SCORES`.
    pub target: Option<String>,
    /// Factor of the loss in the sum of several losses.
    pub factor: f32,
    /// Name of the loss before the multiplication, as an output of the models.
    pub name: Option<String>,
}

impl From<Loss> for LossTerm {
    fn from(loss: Loss) -> LossTerm {
        LossTerm {
            loss,
            settings: LossSettings::default(),
            scores: None,
            target: None,
            factor: 1.0,
            name: None,
        }
    }
}

/// Appends the sum of losses, each times its factor. All are scalars of one type. Returns the name of the sum.
pub fn append_sum(
    graph: &mut GraphProto,
    names: &mut NameGenerator,
    losses: &[(String, f32)],
    dtype: DType,
) -> Option<String> {
    let mut append = GraphAppender { graph, names };
    let mut sum: Option<String> = None;
    for (loss, factor) in losses {
        let mut term = loss.clone();
        if *factor != 1.0 {
            let factor = append.constant("factor", &Tensor::scalar(dtype, f64::from(*factor)));
            term = append.multiply(loss, &factor);
        }
        sum = Some(match sum {
            None => term,
            Some(sum) => append.add(&sum, &term),
        });
    }
    sum
}

/// Renames the output of a node that has no other use; returns `false` if a value of this name exists.
pub fn rename_value(graph: &mut GraphProto, value: &str, name: &str) -> bool {
    if name.is_empty() || is_defined(graph, name) {
        return false;
    }
    let outputs = graph.node.iter_mut().flat_map(|node| &mut node.output);
    outputs.filter(|output| *output == value).for_each(|output| name.clone_into(output));
    true
}

/// Returns true if a value of this name exists.
fn is_defined(graph: &GraphProto, name: &str) -> bool {
    graph.input.iter().any(|info| info.name == name)
        || graph.initializer.iter().any(|tensor| tensor.name == name)
        || graph.node.iter().any(|node| node.input.iter().chain(&node.output).any(|value| value == name))
}

/// Appends a loss to a model's message and returns its name.
///
/// `scores` is the value that the model computes, of type `ty`. `target` is the name of the value to compare with; the
/// default is `target`, or `labels` for class labels. If there is no such value, it becomes an input of the scores'
/// type, or int64 of their shape without the class axis. Scores and target must have the same shape; neither is
/// broadcast.
///
/// # Errors
/// Returns an error if the loss does not support scores of this type, these settings, or the model's opset version.
#[allow(clippy::too_many_arguments, reason = "the arguments are the loss, its inputs and its graph")]
pub fn append_loss(
    graph: &mut GraphProto,
    names: &mut NameGenerator,
    loss: Loss,
    settings: &LossSettings,
    scores: &str,
    ty: &ValueType,
    target: Option<&str>,
    opset: i64,
) -> Result<String, Error> {
    settings.check(loss)?;
    if let Some(input) = &settings.sample_weight {
        let unreduced = LossSettings { reduction: Reduction::None, sample_weight: None, ..settings.clone() };
        let losses = append_loss(graph, names, loss, &unreduced, scores, ty, target, opset)?;
        let labels = target.unwrap_or(default_target(loss));
        return append_row_weights(graph, names, loss, settings, (scores, ty), &losses, labels, input);
    }
    let dtype = match ty {
        ValueType::Tensor(dtype, _) if dtype.is_float() => *dtype,
        _ => return Err(Error::Loss(format!("the scores of a loss must be floats, but {scores:?} is {ty}"))),
    };
    let shape = ty.shape();
    let (default_target, target_ty) = match loss {
        Loss::CrossEntropyLoss if settings.soft => {
            check_classes(scores, ty, settings.resolve_class_axis(scores, ty)?, settings, opset)?;
            (default_target(Loss::MSELoss), ty.clone())
        }
        Loss::CrossEntropyLoss => {
            let axis = settings.resolve_class_axis(scores, ty)?;
            check_classes(scores, ty, axis, settings, opset)?;
            (
                default_target(loss),
                ValueType::Tensor(DType::I64, shape.map(|shape| without_axis(shape, axis))),
            )
        }
        Loss::MSELoss | Loss::BCEWithLogitsLoss | Loss::L1Loss => (default_target(loss), ty.clone()),
    };
    let target = target.unwrap_or(default_target);
    match declared_type(graph, target) {
        Some(found) => check_shapes(loss, (scores, ty), (target, &found), &target_ty)?,
        None if !is_defined(graph, target) => graph.input.push(declare_value(target, &target_ty)),
        None => {}
    }
    let mut append = GraphAppender { graph, names };
    // SoftmaxCrossEntropyLoss has its classes on axis 1.
    let moved = match loss {
        Loss::CrossEntropyLoss if !settings.soft => append.move_classes_to_axis_1(settings, scores, ty)?,
        _ => None,
    };
    let (scores, ty) = moved.as_ref().map_or((scores, ty), |(scores, ty)| (scores.as_str(), ty));
    Ok(match loss {
        Loss::MSELoss => {
            let difference = append.subtract(scores, target);
            let exponent = append.constant("pow_exponent", &Tensor::filled(dtype, &[1], 2.0));
            let squares = append.node("Pow", &[&difference, &exponent], vec![]);
            append.append_reduction(settings.reduction, &squares)
        }
        Loss::L1Loss => {
            let difference = append.subtract(scores, target);
            let magnitudes = append.node("Abs", &[&difference], vec![]);
            append.append_reduction(settings.reduction, &magnitudes)
        }
        Loss::CrossEntropyLoss if settings.soft => append.append_soft_cross_entropy(
            settings,
            scores,
            settings.resolve_class_axis(scores, ty)?,
            target,
        ),
        Loss::CrossEntropyLoss => append.append_cross_entropy(
            settings,
            dtype,
            (scores, &class_broadcast_shape(scores, ty, settings)?),
            target,
        ),
        Loss::BCEWithLogitsLoss => append.append_binary_cross_entropy(settings, dtype, scores, target),
    })
}

/// Multiplies the losses of all elements by a weight for each row, and reduces them. `input` is the name of the weights.
///
/// # Errors
/// Returns an error if the rank of the scores is unknown or zero.
#[allow(clippy::too_many_arguments, reason = "the arguments are those of the loss, and its result")]
fn append_row_weights(
    graph: &mut GraphProto,
    names: &mut NameGenerator,
    loss: Loss,
    settings: &LossSettings,
    (scores, ty): (&str, &ValueType),
    losses: &str,
    labels: &str,
    input: &str,
) -> Result<String, Error> {
    let dtype = ty.dtype().unwrap_or(DType::F32);
    let Some(shape) = ty.shape().filter(|shape| shape.rank() > 0) else {
        return Err(Error::Loss(format!(
            "a weight for each row needs scores with a batch axis, but {scores:?} is {ty}; declare its shape in the \
             model"
        )));
    };
    if !is_defined(graph, input) {
        let rows: Shape = std::iter::once(shape[0].clone()).collect();
        graph.input.push(declare_value(input, &ValueType::Tensor(DType::F32, Some(rows))));
    }
    let is_of_labels = loss == Loss::CrossEntropyLoss;
    let rank = shape.rank() - usize::from(is_of_labels);
    let mut append = GraphAppender { graph, names };
    let mut weights = input.to_owned();
    if dtype != DType::F32 {
        weights = append.cast(&weights, dtype);
    }
    if rank > 1 {
        let mut column = vec![1; rank];
        column[0] = -1;
        let column = append.constant("column", &Tensor::i64(&[rank], &column));
        weights = append.node("Reshape", &[&weights, &column], vec![]);
    }
    let weighted = append.multiply(losses, &weights);
    let is_counted = is_of_labels && (settings.weight.is_some() || settings.ignore_index.is_some());
    if settings.reduction != Reduction::Mean || !is_counted {
        return Ok(append.append_reduction(settings.reduction, &weighted));
    }
    let zero = append.constant("zero", &Tensor::scalar(dtype, 0.0));
    let int_labels = append.append_int_labels(labels);
    let ignored = settings.ignore_index.map(|index| append.append_ignored_labels(index, &int_labels));
    let classes = settings.weight.as_ref().map(|values| append.constant("weight", &values.converted(dtype)));
    let counts =
        append.append_label_counts(dtype, classes.as_deref(), ignored.as_deref(), &int_labels, &zero);
    let [sum, count] = [&weighted, &counts].map(|values| append.append_reduction(Reduction::Sum, values));
    Ok(append.divide(&sum, &count))
}

/// Returns the default name of the target input of a loss.
#[must_use]
pub fn default_target(loss: Loss) -> &'static str {
    if loss == Loss::CrossEntropyLoss { "labels" } else { "target" }
}

/// Returns the shape without one axis.
pub(super) fn without_axis(shape: &Shape, without: usize) -> Shape {
    let remaining = shape.iter().enumerate().filter(|&(axis, _)| axis != without);
    remaining.map(|(_, dim)| dim.clone()).collect()
}

/// Returns the type of an input that a message declares.
fn declared_type(graph: &GraphProto, name: &str) -> Option<ValueType> {
    graph.input.iter().find(|info| info.name == name).and_then(|info| declared_value_type(info).ok())
}

/// Checks that an existing target has the shape that a loss needs for its scores.
fn check_shapes(
    loss: Loss,
    (scores, ty): (&str, &ValueType),
    (target, actual): (&str, &ValueType),
    expected: &ValueType,
) -> Result<(), Error> {
    let (Some(have), Some(expected_shape)) = (actual.shape(), expected.shape()) else { return Ok(()) };
    let differs = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
    if have.rank() == expected_shape.rank() && !have.iter().zip(expected_shape.iter()).any(differs) {
        return Ok(());
    }
    let mut sentence = format!(
        "{} of {scores:?} ({ty}) needs a target of type {expected}, but {target:?} is {actual}",
        loss.label()
    );
    sentence += match loss {
        Loss::CrossEntropyLoss => {
            "; labels have the shape of the scores without the class axis (set it with class_axis)"
        }
        _ => "; neither is broadcast: choose another target for this loss",
    };
    Err(Error::Loss(sentence))
}

fn check_classes(
    scores: &str,
    ty: &ValueType,
    axis: usize,
    settings: &LossSettings,
    opset: i64,
) -> Result<(), Error> {
    let classes = ty.shape().and_then(|shape| shape[axis].known());
    if let (Some(weight), Some(classes)) = (&settings.weight, classes)
        && weight.len() != classes
    {
        let message = format!("weight has {} elements, but {scores:?} has {classes} classes", weight.len());
        return Err(Error::Loss(message));
    }
    // With smoothing, LogSoftmax must be along one axis.
    let oldest = if settings.label_smoothing > 0.0 || settings.soft { 13 } else { 12 };
    if opset < oldest {
        let mut node = Loss::CrossEntropyLoss.label().to_owned();
        if oldest == 13 {
            node += " with label_smoothing";
        }
        return Err(Error::TooOld { node, target: opset, oldest });
    }
    Ok(())
}

/// Returns the shape of one value per class, broadcast to scores with the batch before it. Empty unless labels are
/// smoothed.
fn class_broadcast_shape(scores: &str, ty: &ValueType, settings: &LossSettings) -> Result<Vec<usize>, Error> {
    if settings.label_smoothing == 0.0 {
        return Ok(Vec::new());
    }
    let shape = ty.shape();
    let classes = shape.and_then(|shape| shape[1].known()).or(settings.weight.as_ref().map(Tensor::len));
    match (shape, classes) {
        (Some(shape), Some(classes)) => Ok([vec![1, classes], vec![1; shape.rank() - 2]].concat()),
        _ => Err(Error::Loss(format!(
            "label_smoothing needs the number of classes, but {scores:?} is {ty}; declare it in the model"
        ))),
    }
}

impl GraphAppender<'_> {
    /// Transposes the classes to axis 1, if they are on another axis. Returns the new scores and their type.
    fn move_classes_to_axis_1(
        &mut self,
        settings: &LossSettings,
        scores: &str,
        ty: &ValueType,
    ) -> Result<Option<(String, ValueType)>, Error> {
        let axis = settings.resolve_class_axis(scores, ty)?;
        let ValueType::Tensor(dtype, Some(shape)) = ty else { return Ok(None) };
        if axis == 1 {
            return Ok(None);
        }
        let order: Vec<usize> =
            [0, axis].into_iter().chain((1..shape.rank()).filter(|&other| other != axis)).collect();
        let moved: Shape = order.iter().map(|&axis| shape[axis].clone()).collect();
        let perm: Vec<i64> = order.iter().map(|&axis| axis as i64).collect();
        let name = self.node("Transpose", &[scores], vec![ints_attribute("perm", perm)]);
        Ok(Some((name, ValueType::Tensor(*dtype, Some(moved)))))
    }

    fn append_reduction(&mut self, reduction: Reduction, losses: &str) -> String {
        match reduction {
            Reduction::Mean => self.node("ReduceMean", &[losses], vec![int_attribute("keepdims", 0)]),
            Reduction::Sum => self.node("ReduceSum", &[losses], vec![int_attribute("keepdims", 0)]),
            Reduction::None => losses.to_owned(),
        }
    }

    /// Appends the cross-entropy. `planes` has the sizes of the scores' axes that smoothing needs: the second axis,
    /// followed by ones.
    fn append_cross_entropy(
        &mut self,
        settings: &LossSettings,
        dtype: DType,
        (scores, planes): (&str, &[usize]),
        labels: &str,
    ) -> String {
        // The name is generated even without weights.
        let weight = self.names.next("weight");
        let weight = settings.weight.as_ref().map(|values| {
            self.graph.initializer.push(tensor_to_proto(&weight, &values.converted(dtype)));
            weight.as_str()
        });
        let outputs = vec![self.names.next("loss"), self.names.next("log_prob")];
        let loss = outputs[0].clone();
        let mut attributes = vec![text_attribute("reduction", settings.reduction.name())];
        attributes.extend(settings.ignore_index.map(|index| int_attribute("ignore_index", index)));
        let inputs: Vec<&str> = [scores, labels].into_iter().chain(weight).collect();
        self.append_node("", "SoftmaxCrossEntropyLoss", &inputs, outputs, attributes);
        if settings.label_smoothing == 0.0 {
            return loss;
        }
        let uniform = self.append_uniform_cross_entropy(settings, dtype, (scores, planes), labels, weight);
        let share = f64::from(settings.label_smoothing);
        let [own_shares, rest] =
            [1.0 - share, share / planes[1] as f64].map(|share| Tensor::scalar(dtype, share));
        let (own_share, rest) = (self.constant("own_share", &own_shares), self.constant("share", &rest));
        let own_loss = self.multiply(&loss, &own_share);
        let rest = self.multiply(&uniform, &rest);
        self.add(&own_loss, &rest)
    }

    /// Appends the cross-entropy of a target with a probability for each class.
    fn append_soft_cross_entropy(
        &mut self,
        settings: &LossSettings,
        scores: &str,
        axis: usize,
        target: &str,
    ) -> String {
        let logs = self.log_softmax(scores, axis);
        let products = self.multiply(&logs, target);
        let sums = self.sum_axis(&products, axis);
        let losses = self.negate(&sums);
        self.append_reduction(settings.reduction, &losses)
    }

    /// Appends the sum over all classes of the cross-entropy with each class as the label; `weight` has the same
    /// meaning as for labels.
    fn append_uniform_cross_entropy(
        &mut self,
        settings: &LossSettings,
        dtype: DType,
        (scores, planes): (&str, &[usize]),
        labels: &str,
        weight: Option<&str>,
    ) -> String {
        let logs = self.log_softmax(scores, 1);
        let mut losses = self.negate(&logs);
        if let Some(weight) = &settings.weight {
            // A weight for each plane of a class.
            let planes = Tensor::from_f64(dtype, planes[1..].to_vec(), &weight.to_f64());
            let planes = self.constant("weight_of_planes", &planes);
            losses = self.multiply(&losses, &planes);
        }
        let mut losses = self.sum_axis(&losses, 1);

        let zero = self.constant("zero", &Tensor::scalar(dtype, 0.0));
        let int_labels = self.append_int_labels(labels);
        let ignored = settings.ignore_index.map(|index| self.append_ignored_labels(index, &int_labels));
        if let Some(ignored) = &ignored {
            losses = self.select(ignored, &zero, &losses);
        }
        if settings.reduction != Reduction::Mean || weight.is_none() && ignored.is_none() {
            return self.append_reduction(settings.reduction, &losses);
        }
        let counts = self.append_label_counts(dtype, weight, ignored.as_deref(), &int_labels, &zero);
        let [sum, count] = [&losses, &counts].map(|values| self.append_reduction(Reduction::Sum, values));
        self.divide(&sum, &count)
    }

    fn append_int_labels(&mut self, labels: &str) -> String {
        self.cast(labels, DType::I64)
    }

    /// Appends the mask of the labels that equal `index`.
    fn append_ignored_labels(&mut self, index: i64, int_labels: &str) -> String {
        let index = self.constant("ignore_index", &Tensor::i64(&[], &[index]));
        self.node("Equal", &[int_labels, &index], vec![])
    }

    /// Appends the number that each label adds to the divisor of a mean: its class weight or one, and zero for an
    /// ignored label.
    fn append_label_counts(
        &mut self,
        dtype: DType,
        weight: Option<&str>,
        ignored: Option<&str>,
        int_labels: &str,
        zero: &str,
    ) -> String {
        let counts = match weight {
            None => self.constant("one", &Tensor::scalar(dtype, 1.0)),
            Some(weight) => {
                // An ignored label may be out of range.
                let first = self.constant("first_class", &Tensor::i64(&[], &[0]));
                let valid_labels = match ignored {
                    Some(ignored) => self.select(ignored, &first, int_labels),
                    None => int_labels.to_owned(),
                };
                self.node("Gather", &[weight, &valid_labels], vec![])
            }
        };
        match ignored {
            Some(ignored) => self.select(ignored, zero, &counts),
            None => counts,
        }
    }

    /// Appends the losses of all elements by the formula of onnxruntime-training.
    fn append_binary_losses(
        &mut self,
        dtype: DType,
        (scores, target): (&str, &str),
        pos_weight: Option<&str>,
    ) -> String {
        let one = Tensor::filled(dtype, &[1], 1.0);
        let first_one = self.constant("bceloss.sub_ones", &one);
        let second_one = self.constant("bceloss.sub_ones", &one);
        let probability = self.node("Sigmoid", &[scores], vec![]);
        let log = self.node("Log", &[&probability], vec![]);
        let mut positive = self.multiply(&log, target);
        if let Some(pos_weight) = pos_weight {
            positive = self.multiply(pos_weight, &positive);
        }
        let rest = self.subtract(&first_one, &probability);
        let log = self.node("Log", &[&rest], vec![]);
        let negative_target = self.subtract(&second_one, target);
        let negative = self.multiply(&log, &negative_target);
        let sum = self.add(&positive, &negative);
        self.negate(&sum)
    }

    /// Appends `t * softplus(-z) + (1 - t) * softplus(z)` for the scores z and the target t.
    fn append_stable_binary_losses(
        &mut self,
        dtype: DType,
        (scores, target): (&str, &str),
        pos_weight: Option<&str>,
    ) -> String {
        let negated = self.negate(scores);
        let [positive, negative] =
            [negated.as_str(), scores].map(|logits| self.node("Softplus", &[logits], vec![]));
        let mut positive = self.multiply(&positive, target);
        if let Some(pos_weight) = pos_weight {
            positive = self.multiply(pos_weight, &positive);
        }
        let one = self.constant("one", &Tensor::filled(dtype, &[1], 1.0));
        let rest = self.subtract(&one, target);
        let negative = self.multiply(&negative, &rest);
        self.add(&positive, &negative)
    }

    fn append_binary_cross_entropy(
        &mut self,
        settings: &LossSettings,
        dtype: DType,
        scores: &str,
        target: &str,
    ) -> String {
        let [weight, pos_weight] =
            [("weight", &settings.weight), ("pos_weight", &settings.pos_weight)].map(|(token, values)| {
                let name = self.names.next(token);
                values.as_ref().map(|values| {
                    self.graph.initializer.push(tensor_to_proto(&name, &values.converted(dtype)));
                    name
                })
            });
        let mut losses = match settings.stable {
            true => self.append_stable_binary_losses(dtype, (scores, target), pos_weight.as_deref()),
            false => self.append_binary_losses(dtype, (scores, target), pos_weight.as_deref()),
        };
        if let Some(weight) = &weight {
            losses = self.multiply(weight, &losses);
        }
        self.append_reduction(settings.reduction, &losses)
    }
}

/// Appends one float that depends on all of these floats, in any version: the sum of their means. Returns its name. It
/// represents a loss that is not known yet.
pub fn append_placeholder_loss(graph: &mut GraphProto, values: &[(String, ValueType)]) -> Option<String> {
    let is_scalar = |ty: &ValueType| ty.shape().is_some_and(|shape| shape.rank() == 0);
    let mut names = NameGenerator::new();
    let mut append = GraphAppender { graph, names: &mut names };
    let mut sum: Option<String> = None;
    for (name, ty) in values {
        let mut term = name.clone();
        if ty.dtype() != Some(DType::F32) {
            term = append.cast(&term, DType::F32);
        }
        if !is_scalar(ty) {
            term = append.node("ReduceMean", &[&term], vec![int_attribute("keepdims", 0)]);
        }
        sum = Some(match sum {
            None => term,
            Some(sum) => append.add(&sum, &term),
        });
    }
    sum
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Dim;
    use ortrain_onnx::ValueInfoProto;

    use super::*;

    fn scores(dims: &[Dim]) -> ValueType {
        ValueType::Tensor(DType::F32, Some(dims.iter().cloned().collect()))
    }

    fn shape_of(info: &ValueInfoProto) -> String {
        format!("{:?}", info.r#type)
    }

    #[test]
    fn labels_have_the_shape_of_the_scores_without_the_classes() {
        let mut graph = GraphProto::default();
        let ty = scores(&[Dim::symbol("n"), 21.into(), 4.into(), 6.into()]);
        append_loss(
            &mut graph,
            &mut NameGenerator::new(),
            Loss::CrossEntropyLoss,
            &LossSettings::default(),
            "y",
            &ty,
            Some("l"),
            13,
        )
        .expect("it exists");
        let expected =
            ValueType::Tensor(DType::I64, Some([Dim::symbol("n"), 4.into(), 6.into()].into_iter().collect()));
        assert_eq!(graph.input.len(), 1);
        assert_eq!(shape_of(&graph.input[0]), shape_of(&declare_value("l", &expected)));
    }

    #[test]
    fn uses_existing_target() {
        let mut graph =
            GraphProto { input: vec![declare_value("target", &scores(&[1.into()]))], ..Default::default() };
        let ty = scores(&[1.into()]);
        append_loss(
            &mut graph,
            &mut NameGenerator::new(),
            Loss::L1Loss,
            &LossSettings::default(),
            "y",
            &ty,
            None,
            13,
        )
        .expect("it exists");
        assert_eq!(graph.input.len(), 1);
        assert_eq!(graph.node[0].input, ["y", "target"]);
    }

    #[test]
    fn rejects_incompatible_targets() {
        let refused = |loss, ty: &ValueType, opset| {
            append_loss(
                &mut GraphProto::default(),
                &mut NameGenerator::new(),
                loss,
                &LossSettings::default(),
                "y",
                ty,
                None,
                opset,
            )
            .expect_err("it is refused")
            .to_string()
        };
        let vector = scores(&[3.into()]);
        assert_eq!(
            refused(Loss::CrossEntropyLoss, &vector, 17),
            "cross-entropy needs scores with a batch axis and a class axis, but \"y\" is float32[3]"
        );
        let integers = ValueType::tensor(DType::I64, &[3]);
        assert_eq!(
            refused(Loss::MSELoss, &integers, 17),
            "the scores of a loss must be floats, but \"y\" is int64[3]"
        );
        let matrix = scores(&[3.into(), 2.into()]);
        assert_eq!(
            refused(Loss::CrossEntropyLoss, &matrix, 11),
            "the cross-entropy loss cannot be written at opset 11: it needs opset 12 or newer"
        );
    }
}
