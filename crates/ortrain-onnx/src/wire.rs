//! Scan of the bytes of a protobuf message before prost decodes them.
//!
//! prost checks lengths and limits recursion. But two bytes on the wire can become a struct of hundreds of bytes in
//! memory. This scan sums up the memory of the decoded message, so that a file of a few megabytes cannot request
//! gigabytes. The scan also finds the exact position of damage in a file.

use crate::generated::schema;
use crate::message::{Field, Kind, Message};

/// Result of a scan.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Upper bound of the heap bytes of the decoded message, without payloads, which stay in the file's buffer.
    pub(crate) memory: u64,
    /// Number of fields that the schema does not define. Decoding drops them.
    pub(crate) unknown: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The bytes end inside of a field. `offset` and `field` locate it.
    CutShort {
        offset: usize,
        field: String,
    },
    Malformed {
        offset: usize,
        what: String,
    },
    TooDeep {
        offset: usize,
    },
}

/// Maximum nesting depth of messages in prost and other protobuf libraries.
pub(crate) const MAX_DEPTH: u32 = 100;

/// Upper bound of the number of fields of a message in the schema. A test checks it.
const MAX_FIELDS: usize = 32;

/// Scans a `ModelProto`.
pub(crate) fn scan(bytes: &[u8]) -> Result<Report, Fault> {
    scan_as(&schema::MODEL_PROTO, bytes)
}

/// Scans a `FunctionProto`.
pub(crate) fn scan_function(bytes: &[u8]) -> Result<Report, Fault> {
    scan_as(&schema::FUNCTION_PROTO, bytes)
}

fn scan_as(message: &Message, bytes: &[u8]) -> Result<Report, Fault> {
    let mut walk = Walk { bytes, at: 0, report: Report::default() };
    walk.message(message, bytes.len(), 0)?;
    Ok(walk.report)
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    report: Report,
}

impl Walk<'_> {
    fn message(&mut self, message: &Message, end: usize, depth: u32) -> Result<(), Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::TooDeep { offset: self.at });
        }
        let mut counts = [0_u64; MAX_FIELDS];
        while self.at < end {
            let start = self.at;
            let key = self.varint(end, message.name)?;
            let (wire, field_number) = (key & 7, u32::try_from(key >> 3).unwrap_or(0));
            if field_number == 0 {
                return Err(
                    self.malformed(start, format!("{} has a field without a valid number", message.name))
                );
            }
            match message.fields.iter().position(|field| field.index_of_field == field_number) {
                Some(index) => {
                    counts[index] += self.field(message, &message.fields[index], wire, end, start, depth)?;
                }
                None => {
                    self.report.unknown += 1;
                    match wire {
                        0 => drop(self.varint(end, message.name)?),
                        1 => self.skip(8, end, message.name)?,
                        2 => {
                            let length = self.length(end, message.name)?;
                            self.at += length;
                        }
                        5 => self.skip(4, end, message.name)?,
                        _ => {
                            let what = format!(
                                "{} has an unknown field {field_number} of an unknown wire type {wire}",
                                message.name
                            );
                            return Err(self.malformed(start, what));
                        }
                    }
                }
            }
        }
        for (field, &count) in message.fields.iter().zip(&counts) {
            let size = match field.kind {
                Kind::Varints(size) => size,
                Kind::Fixed32s => 4,
                Kind::Fixed64s => 8,
                Kind::Texts => size_of::<String>(),
                Kind::ByteStrings => size_of::<bytes::Bytes>(),
                Kind::Messages(message) => message.size,
                Kind::Varint | Kind::Fixed32 | Kind::Text | Kind::Bytes | Kind::Message(_) => continue,
            };
            if count > 0 {
                // The capacity of a `Vec` after `count` pushes.
                self.report.memory += count.max(4).next_power_of_two() * size as u64;
            }
        }
        Ok(())
    }

    /// Scans one field, and returns the number of elements that it adds.
    fn field(
        &mut self,
        message: &Message,
        field: &Field,
        wire: u64,
        end: usize,
        start: usize,
        depth: u32,
    ) -> Result<u64, Fault> {
        let name = field.name;
        match (&field.kind, wire) {
            (Kind::Varint | Kind::Varints(_), 0) => drop(self.varint(end, name)?),
            (Kind::Fixed32 | Kind::Fixed32s, 5) => self.skip(4, end, name)?,
            (Kind::Fixed64s, 1) => self.skip(8, end, name)?,
            (Kind::Varints(_) | Kind::Fixed32s | Kind::Fixed64s, 2) => {
                let length = self.length(end, name)?;
                let packed = &self.bytes[self.at..self.at + length];
                self.at += length;
                return Ok(match field.kind {
                    Kind::Fixed32s => length as u64 / 4,
                    Kind::Fixed64s => length as u64 / 8,
                    _ => packed.iter().filter(|&&byte| byte < 0x80).count() as u64,
                });
            }
            (Kind::Bytes | Kind::ByteStrings, 2) => self.at += self.length(end, name)?,
            (Kind::Text | Kind::Texts, 2) => {
                let length = self.length(end, name)?;
                self.at += length;
                if length > 0 {
                    self.report.memory += length as u64 + 16;
                }
            }
            (Kind::Message(inner) | Kind::Messages(inner), 2) => {
                let length = self.length(end, name)?;
                if matches!(field.kind, Kind::Message(_)) {
                    self.report.memory += inner.size as u64;
                }
                self.message(inner, self.at + length, depth + 1)?;
            }
            _ => {
                return Err(self.malformed(
                    start,
                    format!("the field {name} of {} has the wrong wire type", message.name),
                ));
            }
        }
        Ok(1)
    }

    fn varint(&mut self, end: usize, name: &str) -> Result<u64, Fault> {
        let start = self.at;
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let Some(&byte) = self.bytes[..end].get(self.at) else {
                return Err(self.cut_short(start, name));
            };
            self.at += 1;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.malformed(start, format!("{name} holds an integer that is too long")))
    }

    /// Reads a length, and checks that the rest of the enclosing message can hold it.
    fn length(&mut self, end: usize, name: &str) -> Result<usize, Fault> {
        let start = self.at;
        let length = self.varint(end, name)?;
        match usize::try_from(length) {
            Ok(length) if length <= end - self.at => Ok(length),
            _ => Err(self.cut_short(start, name)),
        }
    }

    fn skip(&mut self, count: usize, end: usize, name: &str) -> Result<(), Fault> {
        if end - self.at < count {
            return Err(self.cut_short(self.at, name));
        }
        self.at += count;
        Ok(())
    }

    fn malformed(&self, offset: usize, what: String) -> Fault {
        Fault::Malformed { offset, what }
    }

    fn cut_short(&self, offset: usize, name: &str) -> Fault {
        Fault::CutShort { offset, field: name.to_owned() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_message_fits_the_counters() {
        fn visit(message: &'static Message, visited: &mut Vec<&'static str>) {
            if visited.contains(&message.name) {
                return;
            }
            visited.push(message.name);
            assert!(message.fields.len() <= MAX_FIELDS, "{}", message.name);
            for field in message.fields {
                if let Kind::Message(inner) | Kind::Messages(inner) = field.kind {
                    visit(inner, visited);
                }
            }
        }
        let mut visited = Vec::new();
        visit(&schema::MODEL_PROTO, &mut visited);
        assert!(visited.len() > 25, "{visited:?}");
    }

    #[test]
    fn truncation_is_located() {
        // Field graph (7) declares three bytes, but has one.
        assert_eq!(scan(&[0x3a, 3, 0x12]).unwrap_err(), Fault::CutShort { offset: 1, field: "graph".into() });
        // A varint without its last byte.
        assert_eq!(
            scan(&[0x08, 0x80]).unwrap_err(),
            Fault::CutShort { offset: 1, field: "ir_version".into() }
        );
    }

    #[test]
    fn wrong_wire_types_and_long_integers_are_rejected() {
        let Fault::Malformed { offset: 0, what } = scan(&[0x0a, 0]).unwrap_err() else { panic!() };
        assert_eq!(what, "the field ir_version of ModelProto has the wrong wire type");
        let Fault::Malformed { what, .. } = scan(&[[0x08].as_slice(), &[0xff; 10]].concat()).unwrap_err()
        else {
            panic!()
        };
        assert_eq!(what, "ir_version holds an integer that is too long");
    }

    #[test]
    fn counts_memory_and_unknown_fields() {
        // Field 99, a varint.
        assert_eq!(scan(&[0x98, 0x06, 1]).unwrap().unknown, 1);
        // A graph of a thousand empty nodes.
        let graph = [0x0a_u8, 0].repeat(1000);
        let model = [[0x3a, 0xd0, 0x0f].as_slice(), &graph].concat();
        let report = scan(&model).unwrap();
        assert!(report.memory >= 1000 * size_of::<crate::proto::NodeProto>() as u64);
    }
}
