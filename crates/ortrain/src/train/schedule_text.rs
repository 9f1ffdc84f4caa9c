//! Schedules as text, and their curves as text graphics.

use std::fmt::{self, Display, Write};
use std::str::FromStr;

use crate::train::schedule::Setting;
use crate::{Error, Result, Schedule};

/// Columns and rows of a curve, and the block characters by height.
const CURVE_COLUMNS: usize = 60;
const CURVE_ROWS: usize = 5;
const BLOCK_CHARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Maximum nesting: a schedule in a schedule.
const MAX_NESTING: usize = 2;
/// Maximum characters of an invalid text in an error.
const MAX_QUOTED_CHARS: usize = 60;

impl Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Flag(true) => f.write_str("True"),
            Setting::Flag(false) => f.write_str("False"),
            Setting::Count(count) => write!(f, "{count}"),
            Setting::Number(number) => write!(f, "{number:?}"),
            Setting::Counts(counts) => write!(f, "{counts:?}"),
            Setting::Schedule(schedule) => write!(f, "{schedule}"),
        }
    }
}

/// `Name(setting=value, ...)`, which is valid Python and the input of [`Schedule::from_str`]. Numbers
/// round-trip exactly.
impl Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<String> =
            self.settings().iter().map(|(name, value)| format!("{name}={value}")).collect();
        write!(f, "{}({})", self.name(), settings.join(", "))
    }
}

impl FromStr for Schedule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Schedule> {
        let mut reader = ScheduleParser::new(text);
        let schedule = reader.schedule(0)?;
        reader.expect_end()?;
        Ok(schedule)
    }
}

/// Parser of a text.
pub(crate) struct ScheduleParser<'a> {
    rest: &'a str,
}

impl<'a> ScheduleParser<'a> {
    pub(crate) fn new(text: &'a str) -> ScheduleParser<'a> {
        ScheduleParser { rest: text.trim() }
    }

    /// Parses `Name(setting=value, ...)`.
    pub(crate) fn schedule(&mut self, depth: usize) -> Result<Schedule> {
        if depth >= MAX_NESTING {
            return Err(Error::Argument(
                "a warm-up cannot contain another warm-up; merge them into one".into(),
            ));
        }
        let name = self.name();
        let settings = self.settings(depth)?;
        Schedule::from_settings(name, settings)
    }

    fn name(&mut self) -> &'a str {
        self.take_until(|letter| !letter.is_ascii_alphanumeric() && letter != '_')
    }

    fn take_until(&mut self, end: impl Fn(char) -> bool) -> &'a str {
        self.rest = self.rest.trim_start();
        let (token, rest) = self.rest.split_at(self.rest.find(end).unwrap_or(self.rest.len()));
        self.rest = rest;
        token.trim_end()
    }

    fn accept(&mut self, sign: char) -> bool {
        match self.rest.trim_start().strip_prefix(sign) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, sign: char) -> Result<()> {
        if self.accept(sign) { Ok(()) } else { Err(self.syntax_error(&format!("{sign:?} is expected"))) }
    }

    fn syntax_error(&self, problem: &str) -> Error {
        let at: String = self.rest.chars().take(MAX_QUOTED_CHARS).collect();
        Error::Argument(format!(
            "a schedule is written like \"Linear(total=100)\", but {problem} before {at:?}"
        ))
    }

    /// Checks that no text remains.
    pub(crate) fn expect_end(&self) -> Result<()> {
        if self.rest.trim().is_empty() { Ok(()) } else { Err(self.syntax_error("the end is expected")) }
    }

    /// Returns true if no text remains.
    pub(crate) fn is_done(&self) -> bool {
        self.rest.trim().is_empty()
    }

    /// Expects a word.
    pub(crate) fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.name() == word { Ok(()) } else { Err(self.syntax_error(&format!("{word:?} is expected"))) }
    }

    /// Parses `(setting=value, ...)`.
    pub(crate) fn settings(&mut self, depth: usize) -> Result<Vec<(String, Setting)>> {
        self.expect('(')?;
        let mut pairs = Vec::new();
        while !self.accept(')') {
            let name = self.name().to_owned();
            self.expect('=')?;
            pairs.push((name, self.value(depth)?));
            if !self.accept(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(pairs)
    }

    fn value(&mut self, depth: usize) -> Result<Setting> {
        if self.accept('[') {
            let list = self.take_until(|letter| letter == ']');
            let counts = list.split(',').map(str::trim).filter(|count| !count.is_empty()).map(str::parse);
            let counts = counts.collect::<std::result::Result<_, _>>();
            self.expect(']')?;
            return counts
                .map(Setting::Counts)
                .map_err(|_| self.syntax_error("a list of whole numbers is expected"));
        }
        let before = self.rest;
        let text = self.take_until(|letter| matches!(letter, ',' | ')' | '(' | '='));
        if self.rest.starts_with('(') {
            self.rest = before;
            return self.schedule(depth + 1).map(Setting::Schedule);
        }
        let number =
            || text.parse().map(Setting::Number).map_err(|_| self.syntax_error("a number is expected"));
        match text {
            "True" => Ok(Setting::Flag(true)),
            "False" => Ok(Setting::Flag(false)),
            _ => text.parse().map(Setting::Count).or_else(|_| number()),
        }
    }
}

impl Schedule {
    /// Draws the factor over the steps from 0 to `last` as text; the default `last` is the last step with
    /// changes.
    #[must_use]
    pub fn curve(&self, last: Option<i64>) -> String {
        let last = last.unwrap_or_else(|| self.span());
        draw_curve(&curve_steps(last).map(|t| self.factor(t)), last)
    }
}

/// Returns the steps from 0 to `last` in the columns of a curve.
///
/// ```
/// let steps = ortrain::curve_steps(118);
/// assert_eq!((steps[0], steps[1], steps[59]), (0, 2, 118));
/// ```
#[must_use]
pub fn curve_steps(last: i64) -> [i64; CURVE_COLUMNS] {
    let (last, max_column) = (i128::from(last.max(0)), CURVE_COLUMNS as i128 - 1);
    std::array::from_fn(|k| {
        i64::try_from((last * k as i128 + max_column / 2) / max_column).unwrap_or(i64::MAX)
    })
}

/// Draws these factors as text. The first one is at step 0, the last one at step `last`.
///
/// ```
/// let curve = ortrain::draw_curve(&[0.0, 0.5, 1.0], 2);
/// assert!(curve.starts_with("    1 ┤  █\n"));
/// ```
#[must_use]
pub fn draw_curve(factors: &[f64], last: i64) -> String {
    let highest = factors.iter().copied().filter(|factor| factor.is_finite()).fold(0.0, f64::max);
    let scale = if highest > 0.0 { highest } else { 1.0 };
    let eighths =
        |factor: &f64| (factor / scale * (8 * CURVE_ROWS) as f64).round().clamp(0.0, (8 * CURVE_ROWS) as f64);
    let heights: Vec<usize> = factors.iter().map(|factor| eighths(factor) as usize).collect();
    let mut out = String::new();
    for row in (0..CURVE_ROWS).rev() {
        let label = if row == CURVE_ROWS - 1 { format_short(scale) } else { String::new() };
        let cells: String =
            heights.iter().map(|height| BLOCK_CHARS[height.saturating_sub(8 * row).min(8)]).collect();
        let axis = if row == CURVE_ROWS - 1 { '┤' } else { '│' };
        let _ = writeln!(out, "{}", format!("{label:>5} {axis}{cells}").trim_end());
    }
    let _ = writeln!(out, "    0 └{}", "─".repeat(factors.len()));
    let end = format!("step {last}");
    let _ = write!(out, "       0{end:>width$}", width = factors.len().saturating_sub(1));
    out
}

/// Formats a number compactly.
fn format_short(number: f64) -> String {
    if (0.001..1000.0).contains(&number) {
        let text = format!("{number:.3}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    format!("{number:.0e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_curve() {
        let curve = "Warmup(steps=20, then=Linear(total=59))".parse::<Schedule>().unwrap().curve(None);
        let expected = "    1 ┤                 ▂▄▆█▇▆▅▄▃▂▁
      │             ▂▄▆█████████████▇▆▅▄▃▂▁
      │         ▂▄▆█████████████████████████▇▆▅▃▂▁
      │     ▂▄▆████████████████████████████████████▇▆▅▄▃▂▁
      │ ▂▄▆████████████████████████████████████████████████▇▆▅▄▃▂▁
    0 └────────────────────────────────────────────────────────────
       0                                                    step 59";
        assert_eq!(curve, expected);
    }

    #[test]
    fn rejects_damaged_texts() {
        let deep = "Warmup(steps=1, then=".repeat(100_000);
        let sound = "Warmup(steps=3, then=MultiStep(milestones=[5, 9], gamma=0.1), start=0.0)";
        let truncated = (0..sound.len()).map(|end| sound[..end].to_owned());
        for text in truncated.chain([deep, "Linear(total=9)x".into(), "Linear(total=)".into(), "é(=".into()])
        {
            let error = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(error.len() < 400, "{error}");
        }
    }
}
