//! Learning-rate schedules: factors as functions of the number of optimizer steps.
//!
//! One declaration lists their names, settings, ranges and defaults. Their text format, their checks and the
//! classes of the Python face follow from it. The formulas follow below it.

use std::f64::consts::PI;

use crate::suggest::hint;
use crate::{Error, Result};

/// Number of steps in the curve of a schedule without an end.
const DEFAULT_SPAN: i64 = 100;
/// Number of periods, drops and time scales in a curve.
const CURVE_PERIODS: i64 = 4;
/// Factor at which the curve of an exponential ends.
const MIN_CURVE_FACTOR: f64 = 0.01;

/// Name of a schedule, with its settings and their defaults.
type Kind = (&'static str, &'static [(&'static str, Option<&'static str>)]);

/// Value of a setting of a [`Schedule`].
///
/// ```
/// use ortrain::{Schedule, Setting};
///
/// let settings = vec![("total".to_owned(), Setting::Count(10)), ("end".to_owned(), Setting::Number(0.5))];
/// assert_eq!(Schedule::from_settings("Linear", settings)?, "Linear(total=10, end=0.5)".parse()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    /// A boolean.
    Flag(bool),
    /// A number of steps, or of repetitions.
    Count(i64),
    /// A number.
    Number(f64),
    /// Numbers of steps.
    Counts(Vec<i64>),
    /// A nested schedule.
    Schedule(Schedule),
}

/// A type of settings.
trait SettingType: Sized {
    const WHAT: &'static str;

    fn read(setting: Setting) -> Option<Self>;
    fn show(&self) -> Setting;
}

macro_rules! setting_type {
    ($($ty:ty: $what:literal, $($read:pat => $value:expr),+; $self:ident => $show:expr;)*) => { $(
        impl SettingType for $ty {
            const WHAT: &'static str = $what;

            fn read(setting: Setting) -> Option<$ty> {
                match setting {
                    $($read => Some($value),)+
                    _ => None,
                }
            }

            fn show(&self) -> Setting {
                let $self = self;
                $show
            }
        }
    )* };
}

setting_type! {
    bool: "True or False", Setting::Flag(flag) => flag; flag => Setting::Flag(*flag);
    i64: "a whole number", Setting::Count(count) => count; count => Setting::Count(*count);
    f64: "a number", Setting::Number(number) => number, Setting::Count(count) => count as f64;
        number => Setting::Number(*number);
    Vec<i64>: "a list of whole numbers", Setting::Counts(counts) => counts; counts => Setting::Counts(counts.clone());
    Box<Schedule>: "a schedule", Setting::Schedule(schedule) => Box::new(schedule);
        schedule => Setting::Schedule((**schedule).clone());
}

/// Valid range of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// One or more.
    OneOrMore,
    /// Zero or more.
    Count,
    /// Finite and not negative.
    Factor,
    /// Finite and above zero.
    Positive,
    /// From 0 to 1.
    Share,
    /// Between 0 and 1.
    Shrinks,
    /// Strictly increasing steps, the first of them 1 or more.
    Rising,
    /// Any value of the type.
    Free,
}

impl Rule {
    /// Returns the range in words if the setting is out of range.
    fn broken(self, setting: &Setting) -> Option<&'static str> {
        let number = match *setting {
            Setting::Count(count) => count as f64,
            Setting::Number(number) => number,
            _ => f64::NAN,
        };
        let (sound, range) = match self {
            Rule::OneOrMore => (number >= 1.0, "1 or more"),
            Rule::Count => (number >= 0.0, "0 or more"),
            Rule::Factor => (number >= 0.0 && number.is_finite(), "a finite number that is not negative"),
            Rule::Positive => (number > 0.0 && number.is_finite(), "a finite number above 0"),
            Rule::Share => ((0.0..=1.0).contains(&number), "a number from 0 to 1"),
            Rule::Shrinks => (number > 0.0 && number < 1.0, "a number between 0 and 1"),
            Rule::Rising => {
                let Setting::Counts(steps) = setting else { return None };
                let rise = steps.first().is_some_and(|&first| first >= 1) && steps.is_sorted_by(|a, b| a < b);
                (rise, "increasing steps, the first at least 1")
            }
            Rule::Free => (true, ""),
        };
        (!sound).then_some(range)
    }
}

fn unknown_schedule(name: &str) -> Error {
    let names = || KINDS.iter().map(|(name, _)| *name);
    let suggestion = hint(name, names());
    let all_schedules = || format!("; there are {}", names().collect::<Vec<_>>().join(", "));
    Error::Argument(format!(
        "there is no schedule {name:?}{}",
        if suggestion.is_empty() { all_schedules() } else { suggestion }
    ))
}

/// Settings by name that have not been consumed.
struct Settings<'a> {
    schedule: &'a str,
    known: Vec<&'static str>,
    settings: Vec<(String, Setting)>,
}

impl Settings<'_> {
    fn take<T: SettingType>(&mut self, name: &'static str, default: Option<T>) -> Result<T> {
        self.known.push(name);
        let Some(at) = self.settings.iter().position(|(key, _)| key == name) else {
            return default
                .ok_or_else(|| Error::Argument(format!("{} needs {name}, {}", self.schedule, T::WHAT)));
        };
        let (_, setting) = self.settings.swap_remove(at);
        let text = setting.to_string();
        T::read(setting).ok_or_else(|| {
            Error::Argument(format!("{name} of {} must be {}, got {text}", self.schedule, T::WHAT))
        })
    }

    fn finish(self) -> Result<()> {
        match self.settings.first() {
            None => Ok(()),
            Some((name, _)) if self.known.contains(&name.as_str()) => {
                Err(Error::Argument(format!("{} has the setting {name} twice", self.schedule)))
            }
            Some((name, _)) => Err(Error::Argument(format!(
                "{} has no setting {name:?}{}",
                self.schedule,
                hint(name, self.known)
            ))),
        }
    }
}

macro_rules! if_any {
    () => {
        None
    };
    ($value:expr) => {
        Some($value)
    };
}

macro_rules! schedules {
    ($(#[$about:meta])* pub enum Schedule { $(
        $(#[$docs:meta])* $name:ident { $(
            $(#[$field_docs:meta])* $field:ident: $ty:ty as $rule:ident $(= $default:literal)?
        ),* $(,)? }
    ),* $(,)? }) => {
        $(#[$about])* #[derive(Clone, Debug, PartialEq)] pub enum Schedule { $(
            $(#[$docs])* $name { $( $(#[$field_docs])* $field: $ty ),* }
        ),* }

        const KINDS: &[Kind] = &[$(
            (stringify!($name), &[$( (stringify!($field), if_any!($(stringify!($default))?)) ),*])
        ),*];

        impl Schedule {
            /// Returns name, rule and value of each setting, in the order of their declaration.
            fn described(&self) -> Vec<(&'static str, Rule, Setting)> {
                match self { $(
                    Schedule::$name { $($field),* } => vec![$(
                        (stringify!($field), Rule::$rule, SettingType::show($field))
                    ),*]
                ),* }
            }

            fn unchecked(name: &str, mut settings: Settings<'_>) -> Result<Schedule> {
                let schedule = match name {
                    $( stringify!($name) => Schedule::$name { $(
                        $field: settings.take(stringify!($field), if_any!($($default)?))?
                    ),* }, )*
                    _ => return Err(unknown_schedule(name)),
                };
                settings.finish()?;
                Ok(schedule)
            }

            /// Returns the name of the schedule.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $( Schedule::$name { .. } => stringify!($name) ),* }
            }
        }
    };
}

schedules! {
    /// A learning-rate schedule: the factor of the base rate at each step of a training.
    ///
    /// `t` is the number of completed optimizer steps. Factors are computed in f64. Each formula is equal to
    /// the named class of `torch.optim.lr_scheduler` or function of `transformers.optimization`.
    ///
    /// The text format is the same for input and output; omitted settings have their defaults:
    ///
    /// ```
    /// use ortrain::Schedule;
    ///
    /// let schedule: Schedule = "Warmup(steps=2, then=Linear(total=6))".parse()?;
    /// let factors: Vec<f64> = (0..8).map(|t| schedule.factor(t)).collect();
    /// assert_eq!(factors, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// assert_eq!(schedule.to_string(), "Warmup(steps=2, then=Linear(total=6, end=0.0, start=1.0), start=0.0)");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub enum Schedule {
        /// Always 1.
        Constant {},
        /// A line from `start` to `end`, then constant. Source: `LinearLR`.
        Linear {
            /// Step at which the line ends, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// Last factor.
            end: f64 as Factor = 0.0,
            /// First factor.
            start: f64 as Factor = 1.0,
        },
        /// Half a cosine from 1 to `end`, then `end`. With several cycles, each restarts at 1. Sources:
        /// `CosineAnnealingLR`, `get_cosine_with_hard_restarts_schedule_with_warmup`.
        Cosine {
            /// Step at which the last cosine ends, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// Lowest factor.
            end: f64 as Factor = 0.0,
            /// Number of cosines of equal length.
            cycles: i64 as OneOrMore = 1,
        },
        /// Half a cosine from 1 to `end`, repeated without an end; each period is `growth` times longer than
        /// the previous one. Source: `CosineAnnealingWarmRestarts`.
        CosineRestarts {
            /// Steps of the first cosine.
            first: i64 as OneOrMore,
            /// Ratio of successive period lengths.
            growth: i64 as OneOrMore = 1,
            /// Lowest factor.
            end: f64 as Factor = 0.0,
        },
        /// Polynomial decay: `end + (1 - end) (1 - t/total)^power`, then `end`. Sources: `PolynomialLR`,
        /// `get_polynomial_decay_schedule_with_warmup`.
        Polynomial {
            /// Last step of the decay, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// Exponent.
            power: f64 as Factor = 1.0,
            /// Last factor.
            end: f64 as Factor = 0.0,
        },
        /// `gamma^t`. Source: `ExponentialLR`.
        Exponential {
            /// Factor per step.
            gamma: f64 as Positive,
        },
        /// Multiplies by `gamma` after every `every` steps. Source: `StepLR`.
        Step {
            /// Steps between two drops.
            every: i64 as OneOrMore,
            /// Factor per drop.
            gamma: f64 as Positive = 0.1,
        },
        /// Multiplies by `gamma` at each milestone. Source: `MultiStepLR`.
        MultiStep {
            /// Steps, counted from the first step of the training.
            milestones: Vec<i64> as Rising,
            /// Factor per milestone.
            gamma: f64 as Positive = 0.1,
        },
        /// Half a cosine from `1 / start_division` up to 1, then another one down to
        /// `1 / (start_division * final_division)` at the last step. Source: `OneCycleLR` with two cosine
        /// phases.
        OneCycle {
            /// Steps of the training.
            total: i64 as OneOrMore,
            /// Fraction of the steps that rise.
            rise: f64 as Share = 0.3,
            /// Ratio of the highest rate to the first one.
            start_division: f64 as Positive = 25.0,
            /// Ratio of the first rate to the last one.
            final_division: f64 as Positive = 10000.0,
        },
        /// `sqrt(scale / (t + scale))`. Source: `get_inverse_sqrt_schedule`.
        InverseSquareRoot {
            /// Step at which the factor is `sqrt(1/2)`.
            scale: i64 as OneOrMore,
        },
        /// Multiplies by `factor` after a metric has not improved for more than `patience` steps of the
        /// scheduler. The metric is the argument of [`crate::LrScheduler::step_with`]. Source:
        /// `ReduceLROnPlateau` with `eps=0`.
        ReduceOnPlateau {
            /// Factor per reduction.
            factor: f64 as Shrinks = 0.1,
            /// Tolerated steps without improvement.
            patience: i64 as Count = 10,
            /// Margin by which a metric must exceed the best one.
            threshold: f64 as Factor = 0.0001,
            /// Steps after a reduction that do not count.
            cooldown: i64 as Count = 0,
            /// Lowest factor.
            least: f64 as Share = 0.0,
            /// True if a higher metric is better.
            maximize: bool as Free = false,
            /// True if the threshold is absolute; otherwise it is relative to the best metric.
            absolute: bool as Free = false,
        },
        /// A function of the program, which passes the factor to [`crate::LrScheduler::step_with`].
        Function {},
        /// Linear warm-up, then another schedule. The warm-up is a line from `start` times the first factor
        /// of the other schedule to that factor.
        ///
        /// Totals and milestones of the other schedule count from the first step of the training, everything
        /// else from the end of the warm-up: after a warm-up of 100 steps, `Linear(total=1000)` falls for
        /// 900. Source: `get_linear_schedule_with_warmup`.
        Warmup {
            /// Steps of the warm-up.
            steps: i64 as Count,
            /// Schedule after the warm-up.
            then: Box<Schedule> as Free,
            /// First factor, relative to the other schedule.
            start: f64 as Share = 0.0,
        },
    }
}

/// Value that a schedule requires at each step, besides the number of steps.
///
/// ```
/// use ortrain::{Schedule, ScheduleInput};
///
/// assert_eq!(Schedule::Constant {}.input(), ScheduleInput::Nothing);
/// assert_eq!("ReduceOnPlateau()".parse::<Schedule>()?.input(), ScheduleInput::Metric);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleInput {
    /// Nothing.
    Nothing,
    /// A metric.
    Metric,
    /// A factor, computed by a function of the program.
    Factor,
}

impl Schedule {
    /// Creates a schedule from its name and settings. Omitted settings have their defaults.
    ///
    /// ```
    /// let schedule = ortrain::Schedule::from_settings("Constant", Vec::new())?;
    /// assert_eq!(schedule, ortrain::Schedule::Constant {});
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the name is unknown, or a setting is missing, unknown, or out of range.
    pub fn from_settings(name: &str, settings: Vec<(String, Setting)>) -> Result<Schedule> {
        let parsed = Schedule::unchecked(name, Settings { schedule: name, known: Vec::new(), settings })?;
        parsed.check()?;
        Ok(parsed)
    }

    /// Returns all schedules: their names with their settings and defaults.
    ///
    /// ```
    /// let (name, settings) = ortrain::Schedule::kinds()[1];
    /// assert_eq!((name, settings), ("Linear", &[("total", None), ("end", Some("0.0")), ("start", Some("1.0"))][..]));
    /// ```
    #[must_use]
    pub fn kinds() -> &'static [Kind] {
        KINDS
    }

    /// Returns the settings by name, in the order of their declaration.
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, Setting)> {
        self.described().into_iter().map(|(name, _, value)| (name, value)).collect()
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// If a setting is out of range, or the warm-up is longer than the total.
    pub fn check(&self) -> Result<()> {
        let name = self.name();
        for (setting, rule, value) in self.described() {
            if let Some(range) = rule.broken(&value) {
                return Err(Error::Argument(format!("{setting} of {name} must be {range}, got {value}")));
            }
        }
        let Schedule::Warmup { steps, then, .. } = self else { return Ok(()) };
        if let Schedule::Warmup { .. } = **then {
            return Err(Error::Argument(
                "a warm-up cannot contain another warm-up; merge them into one".into(),
            ));
        }
        then.check()?;
        if let Some(total) = then.total().filter(|total| total < steps) {
            return Err(Error::Argument(format!(
                "a warm-up of {steps} steps is longer than the training of {total}; the total of {} includes the \
                 warm-up",
                then.name()
            )));
        }
        if let Schedule::MultiStep { milestones, .. } = &**then
            && milestones[0] < *steps
        {
            return Err(Error::Argument(format!(
                "milestone {} is in the warm-up of {steps} steps; milestones count from the first step of the training",
                milestones[0]
            )));
        }
        Ok(())
    }

    /// Returns the steps of the complete training, including the warm-up, if the schedule has an end.
    #[must_use]
    pub fn total(&self) -> Option<i64> {
        match self {
            Schedule::Linear { total, .. }
            | Schedule::Cosine { total, .. }
            | Schedule::Polynomial { total, .. }
            | Schedule::OneCycle { total, .. } => Some(*total),
            Schedule::Warmup { then, .. } => then.total(),
            _ => None,
        }
    }

    /// Returns the steps of the warm-up.
    #[must_use]
    pub fn warmup(&self) -> i64 {
        match self {
            Schedule::Warmup { steps, .. } => *steps,
            _ => 0,
        }
    }

    /// Returns the value that the schedule requires at each step, besides the number of steps.
    #[must_use]
    pub fn input(&self) -> ScheduleInput {
        match self {
            Schedule::ReduceOnPlateau { .. } => ScheduleInput::Metric,
            Schedule::Function {} => ScheduleInput::Factor,
            Schedule::Warmup { then, .. } => then.input(),
            _ => ScheduleInput::Nothing,
        }
    }

    /// Returns the factor after `t` optimizer steps. The decision of a metric or a function counts as 1.
    #[must_use]
    pub fn factor(&self, t: i64) -> f64 {
        self.factor_with(t, 1.0)
    }

    /// Returns the factor after `t` optimizer steps, with the factor `decided` from a metric or a function.
    #[must_use]
    pub fn factor_with(&self, t: i64, decided: f64) -> f64 {
        self.factor_at(t.max(0), 0, decided)
    }

    /// Returns the factor after `t` steps of the training, including `from` warm-up steps.
    fn factor_at(&self, t: i64, from: i64, decided: f64) -> f64 {
        let n = t.saturating_sub(from);
        let remaining_steps = |total: i64| total.saturating_sub(from).max(1);
        let share = |total: i64| (n as f64 / remaining_steps(total) as f64).min(1.0);
        match *self {
            Schedule::Constant {} => 1.0,
            Schedule::ReduceOnPlateau { .. } | Schedule::Function {} => decided,
            Schedule::Linear { total, end, start } => interpolate(start, end, share(total)),
            Schedule::Cosine { total, end, cycles } => {
                let total_steps = i128::from(remaining_steps(total));
                if i128::from(n) >= total_steps {
                    return end;
                }
                // Integer arithmetic, since a rounded quotient could be in the wrong cycle.
                let into = i128::from(n) * i128::from(cycles) % total_steps;
                interpolate_cosine(1.0, end, into as f64 / total_steps as f64)
            }
            Schedule::CosineRestarts { first, growth, end } => {
                let (mut into, mut period) = (n, first);
                if growth == 1 {
                    into %= first;
                }
                while into >= period {
                    into -= period;
                    period = period.saturating_mul(growth);
                }
                interpolate_cosine(1.0, end, into as f64 / period as f64)
            }
            Schedule::Polynomial { total, power, end } => {
                if n >= remaining_steps(total) {
                    return end;
                }
                interpolate(end, 1.0, (1.0 - share(total)).powf(power))
            }
            Schedule::Exponential { gamma } => gamma.powf(n as f64),
            Schedule::Step { every, gamma } => gamma.powf((n / every) as f64),
            Schedule::MultiStep { ref milestones, gamma } => {
                gamma.powf(milestones.partition_point(|&milestone| milestone <= t) as f64)
            }
            Schedule::OneCycle { total, rise, start_division, final_division } => {
                let last = (remaining_steps(total) - 1) as f64;
                let peak = rise * remaining_steps(total) as f64 - 1.0;
                let n = (n as f64).min(last);
                let first = 1.0 / start_division;
                match (n < peak, last > peak) {
                    (true, _) => interpolate_cosine(first, 1.0, n / peak),
                    (false, true) => {
                        interpolate_cosine(1.0, first / final_division, (n - peak) / (last - peak))
                    }
                    (false, false) => 1.0,
                }
            }
            Schedule::InverseSquareRoot { scale } => {
                let scale = scale as f64;
                (scale / (n as f64 + scale)).sqrt()
            }
            Schedule::Warmup { steps, ref then, start } => {
                let later = then.factor_at(t.max(steps), steps, decided);
                if t < steps { interpolate(start, 1.0, t as f64 / steps as f64) * later } else { later }
            }
        }
    }

    /// Returns the last step of a curve.
    #[must_use]
    pub fn span(&self) -> i64 {
        if let Some(total) = self.total() {
            return total;
        }
        match self {
            Schedule::CosineRestarts { first: steps, .. }
            | Schedule::Step { every: steps, .. }
            | Schedule::InverseSquareRoot { scale: steps } => steps.saturating_mul(CURVE_PERIODS),
            Schedule::MultiStep { milestones, .. } => milestones
                .last()
                .map_or(DEFAULT_SPAN, |last| last.saturating_add((last / CURVE_PERIODS).max(1))),
            Schedule::Exponential { gamma } if *gamma < 1.0 => {
                (MIN_CURVE_FACTOR.ln() / gamma.ln()).ceil() as i64
            }
            Schedule::Warmup { steps, then, .. } => match **then {
                Schedule::MultiStep { .. } => then.span(),
                _ => steps.saturating_add(then.span().max(*steps)),
            },
            _ => DEFAULT_SPAN,
        }
    }
}

/// Interpolates linearly from `a` at 0 to `b` at 1, exact at both ends.
fn interpolate(a: f64, b: f64, share: f64) -> f64 {
    a * (1.0 - share) + b * share
}

/// Interpolates from `a` at 0 to `b` at 1 along half a cosine, exact at both ends.
fn interpolate_cosine(a: f64, b: f64, share: f64) -> f64 {
    interpolate(b, a, 0.5 * (1.0 + (PI * share).cos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Schedule {
        text.parse().expect("a valid schedule")
    }

    fn parse_error(text: &str) -> String {
        text.parse::<Schedule>().expect_err("it is wrong").to_string()
    }

    /// One of each schedule, with all required settings.
    fn every_schedule() -> Vec<Schedule> {
        let texts = [
            "Constant()",
            "Linear(total=10, end=0.25)",
            "Cosine(total=12, end=0.1, cycles=3)",
            "CosineRestarts(first=4, growth=2, end=0.1)",
            "Polynomial(total=10, power=2.0, end=0.1)",
            "Exponential(gamma=0.9)",
            "Step(every=4)",
            "MultiStep(milestones=[5, 9])",
            "OneCycle(total=12)",
            "InverseSquareRoot(scale=7)",
            "ReduceOnPlateau(patience=2)",
            "Function()",
            "Warmup(steps=3, then=Polynomial(total=10))",
        ];
        texts.map(parse).into()
    }

    #[test]
    fn schedules_round_trip_as_text() {
        let names: Vec<&str> = every_schedule().iter().map(Schedule::name).collect();
        assert_eq!(names, Schedule::kinds().iter().map(|(name, _)| *name).collect::<Vec<_>>());
        for schedule in every_schedule() {
            assert_eq!(parse(&schedule.to_string()), schedule);
        }
    }

    #[test]
    fn warmup_ends_at_first_factor() {
        for then in every_schedule().into_iter().filter(|then| !matches!(then, Schedule::Warmup { .. })) {
            let warm = Schedule::Warmup { steps: 4, then: Box::new(then.clone()), start: 0.25 };
            warm.check().unwrap();
            let top = warm.factor(4);
            let rise: Vec<f64> = (0..4).map(|t| warm.factor(t) / top).collect();
            for (got, expected) in rise.iter().zip([0.25, 0.4375, 0.625, 0.8125]) {
                assert!((got - expected).abs() < 1e-15, "{warm}: {rise:?}");
            }
            assert_eq!(top, then.factor(0), "{warm}");
        }
    }

    #[test]
    fn factors_are_finite_and_nonnegative() {
        for schedule in every_schedule() {
            for t in (-2..40).chain([i64::MIN, i64::MAX / 3, i64::MAX]) {
                let factor = schedule.factor(t);
                assert!((0.0..=1.0).contains(&factor), "{schedule} at {t}: {factor}");
            }
        }
    }

    #[test]
    fn cycles_restart_at_integer_steps() {
        // 7 cycles of 7 steps: 7 * (k / 7) is not an integer for every k in floating point.
        let schedule = parse("Cosine(total=49, cycles=7)");
        assert!((0..7).all(|k| schedule.factor(7 * k) == 1.0));
        let restarts = parse("CosineRestarts(first=3, growth=2)");
        assert_eq!([0, 3, 9, 21].map(|t| restarts.factor(t)), [1.0; 4]);
    }

    #[test]
    fn invalid_settings_report_errors() {
        let table = [
            ("Linear()", "Linear needs total, a whole number"),
            ("Linear(total=0)", "total of Linear must be 1 or more, got 0"),
            ("Linear(total=2.5)", "total of Linear must be a whole number, got 2.5"),
            (
                "Linear(total=9, end=nan)",
                "end of Linear must be a finite number that is not negative, got NaN",
            ),
            ("Linear(total=9, ende=1)", "Linear has no setting \"ende\"; did you mean \"end\"?"),
            ("Linear(total=9, total=8)", "Linear has the setting total twice"),
            (
                "MultiStep(milestones=[4, 4])",
                "milestones of MultiStep must be increasing steps, the first at least 1, got [4, 4]",
            ),
            (
                "Warmup(steps=9, then=Linear(total=8))",
                "a warm-up of 9 steps is longer than the training of 8; the total of Linear includes the warm-up",
            ),
            (
                "Warmup(steps=9, then=MultiStep(milestones=[8]))",
                "milestone 8 is in the warm-up of 9 steps; milestones count from the first step of the training",
            ),
            (
                "Warmup(steps=1, then=Warmup(steps=1, then=Constant()))",
                "a warm-up cannot contain another warm-up; merge them into one",
            ),
            (
                "ReduceOnPlateau(factor=1.0)",
                "factor of ReduceOnPlateau must be a number between 0 and 1, got 1.0",
            ),
        ];
        for (text, sentence) in table {
            assert_eq!(parse_error(text), sentence);
        }
    }
}
