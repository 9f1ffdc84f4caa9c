//! Translation of the WGSL library to CUDA C, so that elementary functions have one source.
//!
//! The rules cover the part of WGSL that the library uses: functions, declarations, scalars and vectors, literals.

/// Translates a function.
pub(crate) fn translate(function: &str) -> String {
    let mut words: Vec<String> = split_words(function);
    join_vector_types(&mut words);
    let mut out: Vec<String> = Vec::with_capacity(words.len());
    let mut at = 0;
    if words.first().is_some_and(|word| word == "fn") {
        at = translate_head(&words, &mut out);
    }
    while at < words.len() {
        at += translate_word(&words[at..], &mut out);
    }
    out.concat()
}

/// Splits a text into names, numbers, spaces and signs. Comments are left out.
fn split_words(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
    let text: String = lines.filter(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect();
    let mut words: Vec<String> = Vec::new();
    for c in text.chars() {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        // The sign of an exponent and the point of a number belong to the number.
        let continues = words.last().is_some_and(|word| {
            let is_number = word.starts_with(|c: char| c.is_ascii_digit()) && !word.starts_with("0x");
            word.starts_with(is_part) && is_part(c)
                || is_number && c == '.'
                || is_number && word.ends_with('e') && c == '-'
        });
        match words.last_mut().filter(|_| continues) {
            Some(word) => word.push(c),
            None => words.push(c.to_string()),
        }
    }
    words
}

/// Joins `vec2`, `<`, `u32`, `>` to the name of a vector type, and `bitcast`, `<`, `u32`, `>` to the name of a function.
fn join_vector_types(words: &mut Vec<String>) {
    let mut at = 0;
    while at + 3 < words.len() {
        if words[at + 1] == "<" && words[at + 3] == ">" {
            let element = words[at + 2].as_str();
            let joined = match (words[at].as_str(), element) {
                ("bitcast", _) => Some(format!("as_{element}")),
                ("vec2" | "vec3" | "vec4", _) => {
                    let name = if element == "f32" { "float" } else { "uint" };
                    Some(format!("{name}{}", &words[at][3..]))
                }
                _ => None,
            };
            if let Some(joined) = joined {
                words.splice(at..at + 4, [joined]);
            }
        }
        at += 1;
    }
}

/// Returns the C type with a name.
fn type_of(name: &str) -> &str {
    match name {
        "f32" => "float",
        "i32" => "int",
        "u32" => "unsigned",
        other => other,
    }
}

/// Translates `fn NAME(PARAMETER: TYPE, …) -> TYPE`, and returns the number of words.
fn translate_head(words: &[String], out: &mut Vec<String>) -> usize {
    let close = words.iter().position(|word| word == ")").unwrap_or(0);
    let open = words.iter().position(|word| word == "(").unwrap_or(0);
    let body = words.iter().position(|word| word == "{").unwrap_or(words.len());
    let is_name = |word: &&String| word.starts_with(|c: char| c.is_ascii_alphabetic());
    let result = words[close..body].iter().find(is_name).map_or("void", |name| type_of(name));
    let names: Vec<&String> = words[open..close].iter().filter(is_name).collect();
    let parameters: Vec<String> =
        names.chunks_exact(2).map(|pair| format!("{} {}", type_of(pair[1]), pair[0])).collect();
    let name = words[..open].iter().rfind(|word| *word != " ").map_or("", String::as_str);
    out.push(format!("DEVICE {result} {name}({}) ", parameters.join(", ")));
    body
}

/// Translates the next word, and returns the number of translated words.
fn translate_word(words: &[String], out: &mut Vec<String>) -> usize {
    let is_call = words.get(1).is_some_and(|next| next == "(");
    match words[0].as_str() {
        word @ ("let" | "var") => {
            let constant = if word == "let" { "const " } else { "" };
            let name = &words[2];
            let ty = words.get(3).filter(|next| *next == ":").map(|_| type_of(&words[5]));
            out.push(format!("{constant}{} {name}", ty.unwrap_or("auto")));
            return if ty.is_some() { 6 } else { 3 };
        }
        "." if matches!(words[1].as_str(), "xy" | "zw") => {
            let operand = operand_start(out);
            out.insert(operand, format!("{}(", words[1]));
            out.push(")".to_owned());
            return 2;
        }
        "countLeadingZeros" => out.push("count_leading_zeros".to_owned()),
        "floor" => out.push("floorf".to_owned()),
        "sqrt" => out.push("sqrtf".to_owned()),
        name if is_call && (name.starts_with("uint") || name.starts_with("float")) && name.len() < 7 => {
            let is_vector = name.ends_with(|c: char| c.is_ascii_digit());
            out.push(if is_vector { format!("make_{name}") } else { name.to_owned() });
        }
        number if number.starts_with(|c: char| c.is_ascii_digit()) => out.push(literal(number)),
        other => out.push(type_of(other).to_owned()),
    }
    1
}

/// Returns the literal of a number: floats end with `f`, signed integers have no suffix.
fn literal(number: &str) -> String {
    if number.starts_with("0x") || number.ends_with(['u', 'f']) {
        number.to_owned()
    } else if let Some(integer) = number.strip_suffix('i') {
        integer.to_owned()
    } else if number.contains(['.', 'e']) {
        format!("{number}f")
    } else {
        number.to_owned()
    }
}

/// Returns the index of the first word of the last operand: a name or a call.
fn operand_start(out: &[String]) -> usize {
    let mut at = out.len() - 1;
    if out[at] == ")" {
        let mut depth = 0;
        loop {
            depth += match out[at].as_str() {
                ")" => 1,
                "(" => -1,
                _ => 0,
            };
            if depth == 0 || at == 0 {
                break;
            }
            at -= 1;
        }
        at = at.saturating_sub(1);
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_translated() {
        let translations = [
            (
                "fn f(a: vec2<u32>, b: i32) -> f32 { return 1.0; }",
                "DEVICE float f(uint2 a, int b) { return 1.0f; }\n",
            ),
            ("let x = 5i + 1e-3;", "const auto x = 5 + 1e-3f;\n"),
            ("var y: vec4<u32> = vec4<u32>(0u, 1u, 2u, 0x3u);", "uint4 y = make_uint4(0u, 1u, 2u, 0x3u);\n"),
            ("return bitcast<u32>(floor(x)) >> 2u;", "return as_u32(floorf(x)) >> 2u;\n"),
            ("let q = divide(a, (b)).xy;", "const auto q = xy(divide(a, (b)));\n"),
            ("return f32(state.zw.x); // A comment.", "return float(zw(state).x);\n"),
        ];
        for (wgsl, c) in translations {
            assert_eq!(translate(wgsl), c);
        }
    }
}
