//! Schemas of messages.

/// Schema of a message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) name: &'static str,
    /// Size of the Rust struct in bytes.
    pub(crate) size: usize,
    pub(crate) fields: &'static [Field],
}

#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) index_of_field: u32,
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

/// Kind of a field. The plural variants are repeated fields. `Varints` contains the size of a decoded element in bytes.
#[derive(Debug)]
pub(crate) enum Kind {
    Varint,
    Varints(usize),
    Fixed32,
    Fixed32s,
    Fixed64s,
    Text,
    Texts,
    Bytes,
    ByteStrings,
    Message(&'static Message),
    Messages(&'static Message),
}
