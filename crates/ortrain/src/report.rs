//! What is known of a model, as text and as JSON.

use std::fmt;

use crate::profile::json;
use crate::{GradientStop, Inspection, NodeNote, Obstacle, ParameterInfo, ParameterRole, StepCost};

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = [
            (ParameterRole::Trained, "trained"),
            (ParameterRole::Statistic, "statistics, in the checkpoint but not trained"),
            (ParameterRole::Constant, "not trained"),
        ];
        for (role, title) in titles {
            let found: Vec<&ParameterInfo> =
                self.parameters.iter().filter(|info| info.role == role).collect();
            let elements: usize = found.iter().map(|info| info.dims.iter().product::<usize>()).sum();
            writeln!(f, "{title}: {} tensors, {elements} elements", found.len())?;
            for ParameterInfo { name, dtype, dims, reason, .. } in found {
                writeln!(f, "  {name}: {dtype}{dims:?}: {reason}")?;
            }
        }
        if !self.stops.is_empty() {
            writeln!(f, "no gradient goes back through: {} nodes", self.stops.len())?;
            for stop in &self.stops {
                writeln!(f, "  {}: {}", stop.node, stop.reason)?;
                if !stop.parameters.is_empty() {
                    writeln!(f, "    not trained for it: {}", stop.parameters.join(", "))?;
                    writeln!(f, "    what helps: {}", stop.fix)?;
                }
            }
        }
        for (title, list) in [("on the host", &self.host_steps), ("control flow", &self.control_flow)] {
            if !list.is_empty() {
                writeln!(f, "{title}: {} nodes", list.len())?;
                for note in list {
                    writeln!(f, "  {}: {}", note.node, note.what)?;
                }
            }
        }
        if let Some(step) = &self.step {
            step.fmt(f)?;
        } else if !self.open_inputs.is_empty() {
            let open: Vec<String> =
                self.open_inputs.iter().map(|(name, ty)| format!("{name}: {ty}")).collect();
            writeln!(
                f,
                "a step can be planned when sizes are given (batch_size, shapes) of {}",
                open.join(", ")
            )?;
        }
        if !self.obstacles.is_empty() {
            writeln!(f, "it cannot be trained as it is:")?;
            for obstacle in &self.obstacles {
                writeln!(f, "  {}", obstacle.what)?;
                writeln!(f, "    what helps: {}", obstacle.fix)?;
            }
        }
        Ok(())
    }
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (k, digit) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The lines of a report.
impl fmt::Display for StepCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inputs: Vec<String> = self.inputs.iter().map(|(name, dims)| format!("{name}{dims:?}")).collect();
        writeln!(f, "one step on {}", inputs.join(", "))?;
        let rows = [
            ("FLOPs, forward", self.forward_flops),
            ("FLOPs, forward and backward", self.training_flops),
            ("bytes of parameters", self.parameters as u64),
            ("bytes of gradients", self.gradients as u64),
            ("bytes of moments of AdamW", self.moments as u64),
            ("bytes of constants", self.constants as u64),
            ("bytes of inputs and activations", self.work as u64),
            ("bytes of scratch", self.scratch as u64),
            ("bytes at the peak of training", self.total() as u64),
        ];
        let rows = rows.map(|(what, number)| (what, grouped(number)));
        let width = rows.iter().map(|(_, number)| number.len()).max().unwrap_or(0);
        for (what, number) in rows {
            writeln!(f, "  {what:<31}  {number:>width$}")?;
        }
        for what in &self.without {
            writeln!(f, "  not counted: {what}")?;
        }
        Ok(())
    }
}

impl Inspection {
    /// Everything, as JSON.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{Scope, inspect};
    ///
    /// let json = inspect(setup::MODEL.into(), &Scope::Outputs)?.to_json();
    /// assert!(json.starts_with(r#"{"parameters":[{"name":"fc1.weight","dtype":"float32""#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        let list = |items: Vec<String>| format!("[{}]", items.join(","));
        let texts = |items: &[String]| list(items.iter().map(|text| json(text)).collect());
        let numbers = |items: &[usize]| list(items.iter().map(ToString::to_string).collect());
        let maybe = |text: &Option<String>| text.as_deref().map_or_else(|| "null".to_owned(), json);
        let object = |fields: &[(&str, String)]| {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{}:{value}", json(name))).collect();
            format!("{{{}}}", fields.join(","))
        };
        let note = |note: &NodeNote| {
            object(&[
                ("node", json(&note.node)),
                ("operator", json(&note.operator)),
                ("what", json(&note.what)),
            ])
        };
        let parameter = |info: &ParameterInfo| {
            object(&[
                ("name", json(&info.name)),
                ("dtype", json(&info.dtype.to_string())),
                ("shape", numbers(&info.dims)),
                ("role", json(info.role.name())),
                ("reason", json(&info.reason)),
            ])
        };
        let obstacle = |obstacle: &Obstacle| {
            object(&[
                ("node", maybe(&obstacle.node)),
                ("operator", maybe(&obstacle.operator)),
                ("what", json(&obstacle.what)),
                ("fix", json(&obstacle.fix)),
            ])
        };
        let stop = |stop: &GradientStop| {
            object(&[
                ("node", json(&stop.node)),
                ("operator", json(&stop.operator)),
                ("reason", json(&stop.reason)),
                ("parameters", texts(&stop.parameters)),
                ("fix", json(&stop.fix)),
            ])
        };
        let step = |step: &StepCost| {
            let inputs: Vec<(&str, String)> =
                step.inputs.iter().map(|(name, dims)| (name.as_str(), numbers(dims))).collect();
            object(&[
                ("inputs", object(&inputs)),
                ("forward_flops", step.forward_flops.to_string()),
                ("training_flops", step.training_flops.to_string()),
                ("parameters", step.parameters.to_string()),
                ("gradients", step.gradients.to_string()),
                ("moments", step.moments.to_string()),
                ("constants", step.constants.to_string()),
                ("work", step.work.to_string()),
                ("scratch", step.scratch.to_string()),
                ("forward_work", step.forward_work.to_string()),
                ("without", texts(&step.without)),
            ])
        };
        let open: Vec<(&str, String)> =
            self.open_inputs.iter().map(|(name, ty)| (name.as_str(), json(ty))).collect();
        object(&[
            ("parameters", list(self.parameters.iter().map(parameter).collect())),
            ("obstacle", maybe(&self.obstacle)),
            ("obstacles", list(self.obstacles.iter().map(obstacle).collect())),
            ("stops", list(self.stops.iter().map(stop).collect())),
            ("host_steps", list(self.host_steps.iter().map(note).collect())),
            ("control_flow", list(self.control_flow.iter().map(note).collect())),
            ("open_inputs", object(&open)),
            ("step", self.step.as_ref().map_or_else(|| "null".to_owned(), step)),
        ])
    }
}
