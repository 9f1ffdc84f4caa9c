//! Schedules: learning rates as functions of the number of optimizer steps.
//!
//! One declaration lists them: names, settings, what a setting may be, and defaults. Their text, their checks and the
//! classes of the Python face follow from it. Their formulas stand below it.

use std::f64::consts::PI;

use crate::suggest::hint;
use crate::{Error, Result};

/// The steps that a curve shows of a schedule without an end.
const SHOWN: i64 = 100;
/// The periods, drops and time scales that a curve shows.
const PERIODS: i64 = 4;
/// The factor at which the curve of an exponential ends.
const FAINT: f64 = 0.01;

/// A schedule by name, with its settings and what these are if they are left out.
type Kind = (&'static str, &'static [(&'static str, Option<&'static str>)]);

/// The value of a setting of a [`Schedule`].
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
    /// Yes or no.
    Flag(bool),
    /// A number of steps, or of times.
    Count(i64),
    /// A number.
    Number(f64),
    /// Numbers of steps.
    Counts(Vec<i64>),
    /// A schedule that another one contains.
    Schedule(Schedule),
}

/// A type that a setting has.
trait Held: Sized {
    const WHAT: &'static str;

    fn read(setting: Setting) -> Option<Self>;
    fn show(&self) -> Setting;
}

macro_rules! held {
    ($($ty:ty: $what:literal, $($read:pat => $value:expr),+; $self:ident => $show:expr;)*) => { $(
        impl Held for $ty {
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

held! {
    bool: "True or False", Setting::Flag(flag) => flag; flag => Setting::Flag(*flag);
    i64: "a whole number", Setting::Count(count) => count; count => Setting::Count(*count);
    f64: "a number", Setting::Number(number) => number, Setting::Count(count) => count as f64;
        number => Setting::Number(*number);
    Vec<i64>: "a list of whole numbers", Setting::Counts(counts) => counts; counts => Setting::Counts(counts.clone());
    Box<Schedule>: "a schedule", Setting::Schedule(schedule) => Box::new(schedule);
        schedule => Setting::Schedule((**schedule).clone());
}

/// The range of a setting.
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
    /// Steps that rise, the first of them 1 or more.
    Rising,
    /// Anything of its type.
    Free,
}

impl Rule {
    /// The range in words, if the setting is outside of it.
    fn broken(self, setting: &Setting) -> Option<&'static str> {
        let number = match *setting {
            Setting::Count(count) => count as f64,
            Setting::Number(number) => number,
            _ => f64::NAN,
        };
        let (sound, wanted) = match self {
            Rule::OneOrMore => (number >= 1.0, "1 or more"),
            Rule::Count => (number >= 0.0, "0 or more"),
            Rule::Factor => (number >= 0.0 && number.is_finite(), "a finite number that is not negative"),
            Rule::Positive => (number > 0.0 && number.is_finite(), "a finite number above 0"),
            Rule::Share => ((0.0..=1.0).contains(&number), "a number from 0 to 1"),
            Rule::Shrinks => (number > 0.0 && number < 1.0, "a number between 0 and 1"),
            Rule::Rising => {
                let Setting::Counts(steps) = setting else { return None };
                let rise = steps.first().is_some_and(|&first| first >= 1) && steps.is_sorted_by(|a, b| a < b);
                (rise, "steps that rise, the first of them 1 or more")
            }
            Rule::Free => (true, ""),
        };
        (!sound).then_some(wanted)
    }
}

fn unknown(name: &str) -> Error {
    let names = || KINDS.iter().map(|(name, _)| *name);
    let near = hint(name, names());
    let known = || format!("; there are {}", names().collect::<Vec<_>>().join(", "));
    Error::Argument(format!("there is no schedule {name:?}{}", if near.is_empty() { known() } else { near }))
}

/// Settings by name, until each was taken.
struct Settings<'a> {
    schedule: &'a str,
    known: Vec<&'static str>,
    given: Vec<(String, Setting)>,
}

impl Settings<'_> {
    fn take<T: Held>(&mut self, name: &'static str, default: Option<T>) -> Result<T> {
        self.known.push(name);
        let Some(at) = self.given.iter().position(|(given, _)| given == name) else {
            return default
                .ok_or_else(|| Error::Argument(format!("{} needs {name}, {}", self.schedule, T::WHAT)));
        };
        let (_, setting) = self.given.swap_remove(at);
        let shown = setting.to_string();
        T::read(setting).ok_or_else(|| {
            Error::Argument(format!("{name} of {} should be {}, not {shown}", self.schedule, T::WHAT))
        })
    }

    fn finish(self) -> Result<()> {
        match self.given.first() {
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
            /// Name, rule and value of each setting, in the order of their declaration.
            fn described(&self) -> Vec<(&'static str, Rule, Setting)> {
                match self { $(
                    Schedule::$name { $($field),* } => vec![$(
                        (stringify!($field), Rule::$rule, Held::show($field))
                    ),*]
                ),* }
            }

            fn unchecked(name: &str, mut settings: Settings<'_>) -> Result<Schedule> {
                let made = match name {
                    $( stringify!($name) => Schedule::$name { $(
                        $field: settings.take(stringify!($field), if_any!($($default)?))?
                    ),* }, )*
                    _ => return Err(unknown(name)),
                };
                settings.finish()?;
                Ok(made)
            }

            /// The name of the schedule.
            ///
            /// ```
            /// assert_eq!(ortrain::Schedule::Exponential { gamma: 0.9 }.name(), "Exponential");
            /// ```
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $( Schedule::$name { .. } => stringify!($name) ),* }
            }
        }
    };
}

schedules! {
    /// A learning rate over the steps of a training, as a factor of the highest or of the first one.
    ///
    /// `t` is the number of optimizer steps done. Factors are computed in f64. Each formula is that of the class of
    /// `torch.optim.lr_scheduler`, or of the function of `transformers.optimization`, that is named with it.
    ///
    /// A schedule is written as it prints itself, with defaults for what is left out:
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
        /// A straight line from `start` to `end`, and `end` from then on. Source: `LinearLR`.
        Linear {
            /// The step at which the line ends, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// The last factor.
            end: f64 as Factor = 0.0,
            /// The first factor.
            start: f64 as Factor = 1.0,
        },
        /// Half a cosine from 1 to `end`; with several cycles it starts anew after each, at 1. Then `end`. Sources:
        /// `CosineAnnealingLR`, `get_cosine_with_hard_restarts_schedule_with_warmup`.
        Cosine {
            /// The step at which the last cosine ends, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// The lowest factor.
            end: f64 as Factor = 0.0,
            /// The number of cosines, of equal length.
            cycles: i64 as OneOrMore = 1,
        },
        /// Half a cosine from 1 to `end`, again and again, each `growth` times as long as the one before, without an end.
        /// Source: `CosineAnnealingWarmRestarts`.
        CosineRestarts {
            /// The steps of the first cosine.
            first: i64 as OneOrMore,
            /// The length of each, as a multiple of the one before.
            growth: i64 as OneOrMore = 1,
            /// The lowest factor.
            end: f64 as Factor = 0.0,
        },
        /// A power of what is left: `end + (1 - end) (1 - t/total)^power`, and `end` from then on. Sources: `PolynomialLR`,
        /// `get_polynomial_decay_schedule_with_warmup`.
        Polynomial {
            /// The step at which it ends, counted from the first step of the training.
            total: i64 as OneOrMore,
            /// The power.
            power: f64 as Factor = 1.0,
            /// The last factor.
            end: f64 as Factor = 0.0,
        },
        /// `gamma^t`. Source: `ExponentialLR`.
        Exponential {
            /// The factor of one step.
            gamma: f64 as Positive,
        },
        /// Times `gamma` after every so many steps. Source: `StepLR`.
        Step {
            /// The steps between two drops.
            every: i64 as OneOrMore,
            /// The factor of one drop.
            gamma: f64 as Positive = 0.1,
        },
        /// Times `gamma` at each milestone. Source: `MultiStepLR`.
        MultiStep {
            /// Steps, counted from the first step of the training.
            milestones: Vec<i64> as Rising,
            /// The factor of one milestone.
            gamma: f64 as Positive = 0.1,
        },
        /// Half a cosine from `1 / start_division` up to 1, and another one down to
        /// `1 / (start_division * final_division)` at the last step. Source: `OneCycleLR` with two phases of cosines.
        OneCycle {
            /// The steps of the training.
            total: i64 as OneOrMore,
            /// The share of the steps that rise.
            rise: f64 as Share = 0.3,
            /// The highest rate over the first one.
            start_division: f64 as Positive = 25.0,
            /// The first rate over the last one.
            final_division: f64 as Positive = 10000.0,
        },
        /// `sqrt(scale / (t + scale))`. Source: `get_inverse_sqrt_schedule`.
        InverseSquareRoot {
            /// The steps until the factor is `sqrt(1/2)`.
            scale: i64 as OneOrMore,
        },
        /// Times `factor` when a metric has not become better for more than `patience` steps of the scheduler; the metric
        /// is given to [`crate::LrScheduler::step_with`]. Source: `ReduceLROnPlateau` with `eps=0`.
        ReduceOnPlateau {
            /// The factor of one reduction.
            factor: f64 as Shrinks = 0.1,
            /// The steps without progress that are borne.
            patience: i64 as Count = 10,
            /// The margin by which a metric must be better than the best one.
            threshold: f64 as Factor = 0.0001,
            /// The steps after a reduction that do not count.
            cooldown: i64 as Count = 0,
            /// The lowest factor.
            least: f64 as Share = 0.0,
            /// Whether a higher metric is a better one.
            maximize: bool as Free = false,
            /// Whether the threshold is a difference; otherwise it is a share of the best metric.
            absolute: bool as Free = false,
        },
        /// A function of the program, which gives the factor to [`crate::LrScheduler::step_with`].
        Function {},
        /// A straight line that rises from `start` times the first factor of another schedule to that factor, and then that
        /// schedule. Totals and milestones of the other one count from the first step of the training, everything else
        /// from the end of the warm-up: behind a warm-up of 100 steps, `Linear(total=1000)` falls for 900. Source:
        /// `get_linear_schedule_with_warmup`.
        Warmup {
            /// The steps of the warm-up.
            steps: i64 as Count,
            /// The schedule behind the warm-up.
            then: Box<Schedule> as Free,
            /// The first factor.
            start: f64 as Share = 0.0,
        },
    }
}

/// The value that a schedule needs at each step, beside the number of steps.
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
    /// The factor that a function of the program says.
    Factor,
}

impl Schedule {
    /// The schedule of a name with settings; those that are left out have their defaults.
    ///
    /// ```
    /// let schedule = ortrain::Schedule::from_settings("Constant", Vec::new())?;
    /// assert_eq!(schedule, ortrain::Schedule::Constant {});
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When there is no such schedule, or a setting is missing, unknown, or not what it may be.
    pub fn from_settings(name: &str, settings: Vec<(String, Setting)>) -> Result<Schedule> {
        let made =
            Schedule::unchecked(name, Settings { schedule: name, known: Vec::new(), given: settings })?;
        made.check()?;
        Ok(made)
    }

    /// All schedules: their names, with their settings and what these are if they are left out.
    ///
    /// ```
    /// let (name, settings) = ortrain::Schedule::kinds()[1];
    /// assert_eq!((name, settings), ("Linear", &[("total", None), ("end", Some("0.0")), ("start", Some("1.0"))][..]));
    /// ```
    #[must_use]
    pub fn kinds() -> &'static [Kind] {
        KINDS
    }

    /// The settings, by name, in the order of their declaration.
    ///
    /// ```
    /// use ortrain::{Schedule, Setting};
    ///
    /// let settings = Schedule::Exponential { gamma: 0.5 }.settings();
    /// assert_eq!(settings, [("gamma", Setting::Number(0.5))]);
    /// ```
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, Setting)> {
        self.described().into_iter().map(|(name, _, value)| (name, value)).collect()
    }

    /// Checks the settings.
    ///
    /// ```
    /// let wrong = ortrain::Schedule::Exponential { gamma: f64::NAN }.check().unwrap_err();
    /// assert_eq!(wrong.to_string(), "gamma of Exponential is NaN, but it should be a finite number above 0");
    /// ```
    ///
    /// # Errors
    /// When one is not what it may be, or a warm-up is longer than the whole.
    pub fn check(&self) -> Result<()> {
        let name = self.name();
        for (setting, rule, value) in self.described() {
            if let Some(wanted) = rule.broken(&value) {
                return Err(Error::Argument(format!(
                    "{setting} of {name} is {value}, but it should be {wanted}"
                )));
            }
        }
        let Schedule::Warmup { steps, then, .. } = self else { return Ok(()) };
        if let Schedule::Warmup { .. } = **then {
            return Err(Error::Argument("a warm-up stands in front of another warm-up; make it one".into()));
        }
        then.check()?;
        if let Some(total) = then.total().filter(|total| total < steps) {
            return Err(Error::Argument(format!(
                "a warm-up of {steps} steps is longer than the training of {total}; the total of {} counts the steps \
                 of the warm-up, too",
                then.name()
            )));
        }
        if let Schedule::MultiStep { milestones, .. } = &**then
            && milestones[0] < *steps
        {
            return Err(Error::Argument(format!(
                "milestone {} lies in the warm-up of {steps} steps; milestones count from the first step of the training",
                milestones[0]
            )));
        }
        Ok(())
    }

    /// The steps of the whole training, warm-up included, if the schedule has an end.
    ///
    /// ```
    /// use ortrain::Schedule;
    ///
    /// assert_eq!("Warmup(steps=5, then=Cosine(total=50))".parse::<Schedule>()?.total(), Some(50));
    /// assert_eq!(Schedule::Constant {}.total(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// The steps of the warm-up.
    ///
    /// ```
    /// assert_eq!(ortrain::Schedule::Constant {}.warmup(), 0);
    /// ```
    #[must_use]
    pub fn warmup(&self) -> i64 {
        match self {
            Schedule::Warmup { steps, .. } => *steps,
            _ => 0,
        }
    }

    /// The value that it needs at each step, beside the number of steps.
    ///
    /// ```
    /// use ortrain::{Schedule, ScheduleInput};
    ///
    /// assert_eq!(Schedule::Function {}.input(), ScheduleInput::Factor);
    /// ```
    #[must_use]
    pub fn input(&self) -> ScheduleInput {
        match self {
            Schedule::ReduceOnPlateau { .. } => ScheduleInput::Metric,
            Schedule::Function {} => ScheduleInput::Factor,
            Schedule::Warmup { then, .. } => then.input(),
            _ => ScheduleInput::Nothing,
        }
    }

    /// The factor after `t` optimizer steps. What a metric or a function decides counts as 1.
    ///
    /// ```
    /// let schedule = ortrain::Schedule::Step { every: 10, gamma: 0.5 };
    /// assert_eq!([0, 9, 10, 25].map(|t| schedule.factor(t)), [1.0, 1.0, 0.5, 0.25]);
    /// ```
    #[must_use]
    pub fn factor(&self, t: i64) -> f64 {
        self.factor_with(t, 1.0)
    }

    /// The factor after `t` optimizer steps, where a metric or a function has decided on `decided`.
    ///
    /// ```
    /// let schedule: ortrain::Schedule = "Warmup(steps=4, then=Function())".parse()?;
    /// assert_eq!([0, 2, 4].map(|t| schedule.factor_with(t, 0.5)), [0.0, 0.25, 0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn factor_with(&self, t: i64, decided: f64) -> f64 {
        self.at(t.max(0), 0, decided)
    }

    /// The factor after `t` steps of the training, of which the warm-up took `from`.
    fn at(&self, t: i64, from: i64, decided: f64) -> f64 {
        let n = t.saturating_sub(from);
        let whole = |total: i64| total.saturating_sub(from).max(1);
        let share = |total: i64| (n as f64 / whole(total) as f64).min(1.0);
        match *self {
            Schedule::Constant {} => 1.0,
            Schedule::ReduceOnPlateau { .. } | Schedule::Function {} => decided,
            Schedule::Linear { total, end, start } => mix(start, end, share(total)),
            Schedule::Cosine { total, end, cycles } => {
                let whole = i128::from(whole(total));
                if i128::from(n) >= whole {
                    return end;
                }
                // Whole numbers, for a rounded quotient would be in the wrong cycle.
                let into = i128::from(n) * i128::from(cycles) % whole;
                cosine(1.0, end, into as f64 / whole as f64)
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
                cosine(1.0, end, into as f64 / period as f64)
            }
            Schedule::Polynomial { total, power, end } => {
                if n >= whole(total) {
                    return end;
                }
                mix(end, 1.0, (1.0 - share(total)).powf(power))
            }
            Schedule::Exponential { gamma } => gamma.powf(n as f64),
            Schedule::Step { every, gamma } => gamma.powf((n / every) as f64),
            Schedule::MultiStep { ref milestones, gamma } => {
                gamma.powf(milestones.partition_point(|&milestone| milestone <= t) as f64)
            }
            Schedule::OneCycle { total, rise, start_division, final_division } => {
                let last = (whole(total) - 1) as f64;
                let peak = rise * whole(total) as f64 - 1.0;
                let n = (n as f64).min(last);
                let first = 1.0 / start_division;
                match (n < peak, last > peak) {
                    (true, _) => cosine(first, 1.0, n / peak),
                    (false, true) => cosine(1.0, first / final_division, (n - peak) / (last - peak)),
                    (false, false) => 1.0,
                }
            }
            Schedule::InverseSquareRoot { scale } => {
                let scale = scale as f64;
                (scale / (n as f64 + scale)).sqrt()
            }
            Schedule::Warmup { steps, ref then, start } => {
                let later = then.at(t.max(steps), steps, decided);
                if t < steps { mix(start, 1.0, t as f64 / steps as f64) * later } else { later }
            }
        }
    }

    /// The last step that a curve shows.
    ///
    /// ```
    /// assert_eq!(ortrain::Schedule::Step { every: 10, gamma: 0.5 }.span(), 40);
    /// ```
    #[must_use]
    pub fn span(&self) -> i64 {
        if let Some(total) = self.total() {
            return total;
        }
        match self {
            Schedule::CosineRestarts { first: steps, .. }
            | Schedule::Step { every: steps, .. }
            | Schedule::InverseSquareRoot { scale: steps } => steps.saturating_mul(PERIODS),
            Schedule::MultiStep { milestones, .. } => {
                milestones.last().map_or(SHOWN, |last| last.saturating_add((last / PERIODS).max(1)))
            }
            Schedule::Exponential { gamma } if *gamma < 1.0 => (FAINT.ln() / gamma.ln()).ceil() as i64,
            Schedule::Warmup { steps, then, .. } => match **then {
                Schedule::MultiStep { .. } => then.span(),
                _ => steps.saturating_add(then.span().max(*steps)),
            },
            _ => SHOWN,
        }
    }
}

/// From `a` at 0 to `b` at 1, exact at both.
fn mix(a: f64, b: f64, share: f64) -> f64 {
    a * (1.0 - share) + b * share
}

/// From `a` at 0 to `b` at 1 along half a cosine, exact at both.
fn cosine(a: f64, b: f64, share: f64) -> f64 {
    mix(b, a, 0.5 * (1.0 + (PI * share).cos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(text: &str) -> Schedule {
        text.parse().expect("a sound schedule")
    }

    fn refused(text: &str) -> String {
        text.parse::<Schedule>().expect_err("it is wrong").to_string()
    }

    /// One of each, with every setting that must be given.
    fn all() -> Vec<Schedule> {
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
        texts.map(made).into()
    }

    #[test]
    fn every_schedule_is_listed_and_comes_back_from_its_text() {
        let names: Vec<&str> = all().iter().map(Schedule::name).collect();
        assert_eq!(names, Schedule::kinds().iter().map(|(name, _)| *name).collect::<Vec<_>>());
        for schedule in all() {
            assert_eq!(made(&schedule.to_string()), schedule);
        }
    }

    #[test]
    fn a_warm_up_ends_where_the_schedule_begins() {
        for then in all().into_iter().filter(|then| !matches!(then, Schedule::Warmup { .. })) {
            let warm = Schedule::Warmup { steps: 4, then: Box::new(then.clone()), start: 0.25 };
            warm.check().unwrap();
            let top = warm.factor(4);
            let rise: Vec<f64> = (0..4).map(|t| warm.factor(t) / top).collect();
            for (found, wanted) in rise.iter().zip([0.25, 0.4375, 0.625, 0.8125]) {
                assert!((found - wanted).abs() < 1e-15, "{warm}: {rise:?}");
            }
            assert_eq!(top, then.factor(0), "{warm}");
        }
    }

    #[test]
    fn every_factor_at_every_step_is_finite_and_not_negative() {
        for schedule in all() {
            for t in (-2..40).chain([i64::MIN, i64::MAX / 3, i64::MAX]) {
                let factor = schedule.factor(t);
                assert!((0.0..=1.0).contains(&factor), "{schedule} at {t}: {factor}");
            }
        }
    }

    #[test]
    fn cycles_begin_at_whole_steps() {
        // 7 cycles of 7 steps: 7 * (k / 7) is no whole number for every k in floating point.
        let schedule = made("Cosine(total=49, cycles=7)");
        assert!((0..7).all(|k| schedule.factor(7 * k) == 1.0));
        let restarts = made("CosineRestarts(first=3, growth=2)");
        assert_eq!([0, 3, 9, 21].map(|t| restarts.factor(t)), [1.0; 4]);
    }

    #[test]
    fn settings_are_refused_by_a_sentence() {
        let table = [
            ("Linear()", "Linear needs total, a whole number"),
            ("Linear(total=0)", "total of Linear is 0, but it should be 1 or more"),
            ("Linear(total=2.5)", "total of Linear should be a whole number, not 2.5"),
            (
                "Linear(total=9, end=nan)",
                "end of Linear is NaN, but it should be a finite number that is not negative",
            ),
            ("Linear(total=9, ende=1)", "Linear has no setting \"ende\"; did you mean \"end\"?"),
            ("Linear(total=9, total=8)", "Linear has the setting total twice"),
            (
                "MultiStep(milestones=[4, 4])",
                "milestones of MultiStep is [4, 4], but it should be steps that rise, the first of them 1 or more",
            ),
            (
                "Warmup(steps=9, then=Linear(total=8))",
                "a warm-up of 9 steps is longer than the training of 8; the total of Linear counts the steps of the \
                 warm-up, too",
            ),
            (
                "Warmup(steps=9, then=MultiStep(milestones=[8]))",
                "milestone 8 lies in the warm-up of 9 steps; milestones count from the first step of the training",
            ),
            (
                "Warmup(steps=1, then=Warmup(steps=1, then=Constant()))",
                "a warm-up stands in front of another warm-up; make it one",
            ),
            (
                "ReduceOnPlateau(factor=1.0)",
                "factor of ReduceOnPlateau is 1.0, but it should be a number between 0 and 1",
            ),
        ];
        for (text, sentence) in table {
            assert_eq!(refused(text), sentence);
        }
    }
}
