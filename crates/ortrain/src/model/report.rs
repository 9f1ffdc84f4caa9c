//! Inspection reports as text and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use ortrain_graph::byte_length;

use crate::exec::profile::to_json_string;
use crate::train::optim::OptimizerSpec;
use crate::{
    Confidence, FileKind, GradientStop, Inspection, NodeNote, Obstacle, ParameterInfo, ParameterRole,
    StepCost, StopCandidate,
};

/// Maximum lines of a list in a short report.
const MAX_LISTED: usize = 8;

/// Writes up to [`SHOWN`] lines and the number of the others; with `{:#}` all of them.
fn write_list<T>(
    f: &mut fmt::Formatter<'_>,
    items: &[T],
    mut line: impl FnMut(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    // One excess line is as short as the note about it.
    let listed_count = if f.alternate() || items.len() <= MAX_LISTED + 1 { items.len() } else { MAX_LISTED };
    items[..listed_count].iter().try_for_each(|item| line(f, item))?;
    match items.len() - listed_count {
        0 => Ok(()),
        more => writeln!(f, "  and {more} more"),
    }
}

/// Formats a count with its noun.
fn format_count(count: usize, noun: &str) -> String {
    format!("{} {noun}{}", group_digits(count as u64), if count == 1 { "" } else { "s" })
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.kind.name_with_article(), self.kind.purpose())?;
        let trained = match self.kind {
            FileKind::EvalModel => "parameters",
            _ => "trained",
        };
        let constant_title = match self.kind {
            FileKind::Safetensors => "tensors",
            _ => "not trained",
        };
        let titles = [
            (ParameterRole::Trained, trained),
            (ParameterRole::Statistic, "statistics, in the checkpoint but not trained"),
            (ParameterRole::Constant, constant_title),
        ];
        for (role, title) in titles {
            let mut parameters: Vec<&ParameterInfo> =
                self.parameters.iter().filter(|info| info.role == role).collect();
            // Guesses come first, because the user decides about them.
            parameters.sort_by_key(|info| info.confidence != Confidence::Guess);
            // A forward model without trained parameters is worth a line.
            if parameters.is_empty()
                && !(role == ParameterRole::Trained && self.kind == FileKind::ForwardModel)
            {
                continue;
            }
            let sum = |size: &dyn Fn(&ParameterInfo, usize) -> usize| {
                // Declared shapes may be of any size.
                let elements =
                    |info: &ParameterInfo| info.dims.iter().copied().fold(1, usize::saturating_mul);
                let of = |info: &&ParameterInfo| size(info, elements(info));
                parameters.iter().map(of).fold(0, usize::saturating_add)
            };
            let elements = sum(&|_, elements| elements);
            let bytes = sum(&|info, elements| byte_length(info.dtype, &info.dims).unwrap_or(elements));
            writeln!(
                f,
                "{title}: {}, {}, {}",
                format_count(parameters.len(), "tensor"),
                format_count(elements, "element"),
                format_bytes(bytes as u64)
            )?;
            write_list(f, &parameters, |f, ParameterInfo { name, dtype, dims, confidence, reason, .. }| {
                let guess = if *confidence == Confidence::Guess { "a guess: " } else { "" };
                writeln!(f, "  {name}: {dtype}{dims:?}: {guess}{reason}")
            })?;
        }
        if self.kind != FileKind::ForwardModel {
            if !self.inputs.is_empty() {
                writeln!(f, "inputs: {}", format_inputs(&self.inputs))?;
            }
            return self.optimizer.as_ref().map_or(Ok(()), |optimizer| write_optimizer(f, optimizer));
        }
        if !self.stops.is_empty() {
            writeln!(f, "gradients stop at: {}", format_count(self.stops.len(), "node"))?;
            write_list(f, &self.stops, |f, stop| {
                writeln!(f, "  {}: {}", stop.node, stop.reason)?;
                if stop.parameters.is_empty() {
                    return Ok(());
                }
                let max_names = if f.alternate() { stop.parameters.len() } else { MAX_LISTED };
                let hidden = stop.parameters.len().saturating_sub(max_names);
                let names = stop.parameters[..stop.parameters.len() - hidden].join(", ");
                let rest = if hidden > 0 { format!(" and {hidden} more") } else { String::new() };
                writeln!(f, "    not trained because of it: {names}{rest}")?;
                writeln!(f, "    remedy: {}", stop.fix)
            })?;
        }
        if !self.stop_candidates.is_empty() {
            let count = format_count(self.stop_candidates.len(), "value");
            writeln!(f, "possible detach or no_grad (stop_gradients): {count}")?;
            write_list(f, &self.stop_candidates, |f, StopCandidate { value, reason }| {
                writeln!(f, "  {value}: {reason}")
            })?;
        }
        let warnings: Vec<&String> = self.about_guesses.iter().chain(&self.warnings).collect();
        if !warnings.is_empty() {
            writeln!(f, "warnings:")?;
            write_list(f, &warnings, |f, warning| writeln!(f, "  {warning}"))?;
        }
        for (title, list) in [("on the host", &self.host_steps), ("control flow", &self.control_flow)] {
            if !list.is_empty() {
                writeln!(f, "{title}: {}", format_count(list.len(), "node"))?;
                write_list(f, list, |f, note| writeln!(f, "  {}: {}", note.node, note.what))?;
            }
        }
        if let Some(step) = &self.step {
            step.fmt(f)?;
        } else if !self.open_inputs.is_empty() {
            writeln!(
                f,
                "cost of a step: unknown; give sizes (batch_size, shapes) of {}",
                format_inputs(&self.open_inputs)
            )?;
        } else if !self.value_inputs.is_empty() {
            writeln!(
                f,
                "cost of a step: known when it runs; shapes depend on the values of {}",
                self.value_inputs.join(", ")
            )?;
        }
        if !self.obstacles.is_empty() {
            writeln!(f, "obstacles to training:")?;
            for obstacle in &self.obstacles {
                writeln!(f, "  {}", obstacle.what)?;
                writeln!(f, "    remedy: {}", obstacle.fix)?;
            }
        }
        Ok(())
    }
}

/// Writes an optimizer with its groups.
fn write_optimizer(f: &mut fmt::Formatter<'_>, spec: &OptimizerSpec) -> fmt::Result {
    let numbers = |settings: &BTreeMap<String, f64>| {
        settings.iter().map(|(name, value)| format!("{name}={value:?}")).collect::<Vec<String>>()
    };
    let mut fields = vec![format!("lr={:?}", spec.learning_rate)];
    fields.extend(numbers(&spec.settings));
    fields.extend(spec.flags.iter().map(|(name, value)| format!("{name}={value}")));
    fields.extend(spec.max_norm.map(|norm| format!("max_norm={norm:?}")));
    fields.extend(spec.mean_of_gathered.then(|| "the mean of accumulated gradients".to_owned()));
    writeln!(f, "optimizer: {}({})", spec.optimizer, fields.join(", "))?;
    let slots: Vec<&str> = spec.slots.iter().map(|slot| slot.name.as_str()).collect();
    if !slots.is_empty() {
        writeln!(f, "  state of each parameter: {}", slots.join(", "))?;
    }
    for (k, group) in spec.groups.iter().enumerate() {
        let mut group_fields = vec![match group.lr {
            Some(lr) => format!("lr={lr:?}"),
            None => format!("lr_factor={:?}", group.lr_factor),
        }];
        group_fields.extend((group.frozen_steps > 0).then(|| format!("frozen_steps={}", group.frozen_steps)));
        let own_settings =
            group.settings.iter().filter(|(name, value)| spec.settings.get(*name) != Some(value));
        group_fields.extend(own_settings.map(|(name, value)| format!("{name}={value:?}")));
        writeln!(
            f,
            "  group {k}: {}, {}",
            format_count(group.parameters.len(), "parameter"),
            group_fields.join(", ")
        )?;
        write_list(f, &group.parameters, |f, name| writeln!(f, "    {name}"))?;
    }
    if !spec.groups.is_empty() {
        writeln!(f, "  other parameters: settings of the optimizer")?;
    }
    Ok(())
}

fn format_inputs(inputs: &[(String, String)]) -> String {
    let formatted: Vec<String> = inputs.iter().map(|(name, ty)| format!("{name}: {ty}")).collect();
    formatted.join(", ")
}

/// Formats a number with digits in groups of three.
fn group_digits(number: u64) -> String {
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

/// Formats a number with a unit and at least three digits: `12.3 MB`, `999 B`.
fn format_with_prefix(number: u64, unit: &str) -> String {
    const PREFIXES: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut prefix) = (number as f64, 0);
    // Values that would round to 1000 use the next prefix.
    while value >= if prefix == 0 { 1000.0 } else { 999.95 } {
        value /= 1000.0;
        prefix += 1;
    }
    match prefix {
        0 => format!("{number} {unit}"),
        _ => format!("{value:.1} {}{unit}", PREFIXES[prefix]),
    }
}

/// Formats bytes with a decimal prefix: `12.3 MB` are about 12 300 000 bytes.
fn format_bytes(bytes: u64) -> String {
    format_with_prefix(bytes, "B")
}

/// Lines of a report.
impl fmt::Display for StepCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inputs: Vec<String> = self.inputs.iter().map(|(name, dims)| format!("{name}{dims:?}")).collect();
        writeln!(f, "one step on {}", inputs.join(", "))?;
        let flops = |number| format_with_prefix(number, "FLOP");
        let bytes = |number: usize| format_bytes(number as u64);
        let rows = [
            ("forward", flops(self.forward_flops)),
            ("forward and backward", flops(self.training_flops)),
            ("parameters", bytes(self.parameters)),
            ("gradients", bytes(self.gradients)),
            ("moments of AdamW", bytes(self.moments)),
            ("constants", bytes(self.constants)),
            ("inputs and activations", bytes(self.work)),
            ("scratch", bytes(self.scratch)),
            ("peak of training", bytes(self.total())),
        ];
        // Numbers are right-aligned; units differ in length.
        let number = |text: &str| text.find(' ').unwrap_or(text.len());
        let width = rows.iter().map(|(_, text)| number(text)).max().unwrap_or(0);
        for (label, text) in rows {
            writeln!(f, "  {label:<22}  {:1$}{text}", "", width - number(&text))?;
        }
        for omission in &self.without {
            writeln!(f, "  not counted: {omission}")?;
        }
        Ok(())
    }
}

impl Inspection {
    /// Returns the complete inspection as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let list = |items: Vec<String>| format!("[{}]", items.join(","));
        let texts = |items: &[String]| list(items.iter().map(|text| to_json_string(text)).collect());
        let numbers = |items: &[usize]| list(items.iter().map(ToString::to_string).collect());
        let maybe = |text: &Option<String>| text.as_deref().map_or_else(|| "null".to_owned(), to_json_string);
        let object = |fields: &[(&str, String)]| {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{}:{value}", to_json_string(name))).collect();
            format!("{{{}}}", fields.join(","))
        };
        let note = |note: &NodeNote| {
            object(&[
                ("node", to_json_string(&note.node)),
                ("operator", to_json_string(&note.operator)),
                ("what", to_json_string(&note.what)),
            ])
        };
        let parameter = |info: &ParameterInfo| {
            object(&[
                ("name", to_json_string(&info.name)),
                ("dtype", to_json_string(&info.dtype.to_string())),
                ("shape", numbers(&info.dims)),
                ("role", to_json_string(info.role.name())),
                ("confidence", to_json_string(info.confidence.name())),
                ("reason", to_json_string(&info.reason)),
                ("nodes", texts(&info.nodes)),
                ("layer", info.layer.map_or_else(|| "null".to_owned(), |layer| layer.to_string())),
            ])
        };
        let obstacle = |obstacle: &Obstacle| {
            object(&[
                ("node", maybe(&obstacle.node)),
                ("operator", maybe(&obstacle.operator)),
                ("what", to_json_string(&obstacle.what)),
                ("fix", to_json_string(&obstacle.fix)),
            ])
        };
        let stop = |stop: &GradientStop| {
            object(&[
                ("node", to_json_string(&stop.node)),
                ("operator", to_json_string(&stop.operator)),
                ("reason", to_json_string(&stop.reason)),
                ("parameters", texts(&stop.parameters)),
                ("fix", to_json_string(&stop.fix)),
            ])
        };
        let candidate = |StopCandidate { value, reason }: &StopCandidate| {
            object(&[("value", to_json_string(value)), ("reason", to_json_string(reason))])
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
        let typed = |inputs: &[(String, String)]| {
            let json_fields: Vec<(&str, String)> =
                inputs.iter().map(|(name, ty)| (name.as_str(), to_json_string(ty))).collect();
            object(&json_fields)
        };
        object(&[
            ("kind", to_json_string(self.kind.name())),
            ("inputs", typed(&self.inputs)),
            ("parameters", list(self.parameters.iter().map(parameter).collect())),
            ("obstacle", maybe(&self.obstacle)),
            ("obstacles", list(self.obstacles.iter().map(obstacle).collect())),
            ("stops", list(self.stops.iter().map(stop).collect())),
            ("stop_candidates", list(self.stop_candidates.iter().map(candidate).collect())),
            ("warnings", texts(&self.warnings)),
            ("about_guesses", maybe(&self.about_guesses)),
            ("host_steps", list(self.host_steps.iter().map(note).collect())),
            ("control_flow", list(self.control_flow.iter().map(note).collect())),
            ("open_inputs", typed(&self.open_inputs)),
            ("value_inputs", texts(&self.value_inputs)),
            ("step", self.step.as_ref().map_or_else(|| "null".to_owned(), step)),
            ("optimizer", self.optimizer.as_ref().map_or_else(|| "null".to_owned(), OptimizerSpec::to_text)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_byte_prefixes() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (28_840, "28.8 kB"),
            (999_949, "999.9 kB"),
            (999_960, "1.0 MB"),
            (12_300_000, "12.3 MB"),
            (2_400_000_000, "2.4 GB"),
            (u64::MAX, "18.4 EB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }
}
