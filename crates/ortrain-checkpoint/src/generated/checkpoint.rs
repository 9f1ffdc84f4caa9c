pub use root::*;

const _: () = ::planus::check_version_compatibility("planus-1.3.0");

/// The root namespace
///
/// Generated from these locations:
/// * File `schema/checkpoint.fbs`
#[no_implicit_prelude]
#[allow(clippy::needless_lifetimes)]
mod root {
    /// The namespace `ortrain`
    ///
    /// Generated from these locations:
    /// * File `schema/checkpoint.fbs`
    pub mod ortrain {
        /// The namespace `ortrain.checkpoint`
        ///
        /// Generated from these locations:
        /// * File `schema/checkpoint.fbs`
        pub mod checkpoint {
            /// The table `Tensor` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `Tensor` in the file `schema/checkpoint.fbs:9`
            #[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord, Hash)]
            pub struct Tensor {
                /// The field `name` in the table `Tensor`
                pub name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `doc_string` in the table `Tensor`
                pub doc_string: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `dims` in the table `Tensor`
                pub dims: ::core::option::Option<::planus::alloc::vec::Vec<i64>>,
                /// The field `data_type` in the table `Tensor`
                pub data_type: i32,
                /// The field `raw_data` in the table `Tensor`
                pub raw_data: ::core::option::Option<::planus::alloc::vec::Vec<u8>>,
                /// The field `string_data` in the table `Tensor`
                pub string_data:
                    ::core::option::Option<::planus::alloc::vec::Vec<::planus::alloc::string::String>>,
                /// The field `external_data_offset` in the table `Tensor`
                pub external_data_offset: i64,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for Tensor {
                fn default() -> Self {
                    Self {
                        name: ::core::default::Default::default(),
                        doc_string: ::core::default::Default::default(),
                        dims: ::core::default::Default::default(),
                        data_type: 0,
                        raw_data: ::core::default::Default::default(),
                        string_data: ::core::default::Default::default(),
                        external_data_offset: -1,
                    }
                }
            }

            impl Tensor {
                /// Creates a [TensorBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> TensorBuilder<()> {
                    TensorBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_doc_string: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_dims: impl ::planus::WriteAsOptional<::planus::Offset<[i64]>>,
                    field_data_type: impl ::planus::WriteAsDefault<i32, i32>,
                    field_raw_data: impl ::planus::WriteAsOptional<::planus::Offset<[u8]>>,
                    field_string_data: impl ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<str>]>>,
                    field_external_data_offset: impl ::planus::WriteAsDefault<i64, i64>,
                ) -> ::planus::Offset<Self> {
                    let prepared_name = field_name.prepare(builder);
                    let prepared_doc_string = field_doc_string.prepare(builder);
                    let prepared_dims = field_dims.prepare(builder);
                    let prepared_data_type = field_data_type.prepare(builder, &0);
                    let prepared_raw_data = field_raw_data.prepare(builder);
                    let prepared_string_data = field_string_data.prepare(builder);
                    let prepared_external_data_offset = field_external_data_offset.prepare(builder, &-1);

                    let mut table_writer: ::planus::table_writer::TableWriter<18> =
                        ::core::default::Default::default();
                    if prepared_external_data_offset.is_some() {
                        table_writer.write_entry::<i64>(6);
                    }
                    if prepared_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_doc_string.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(1);
                    }
                    if prepared_dims.is_some() {
                        table_writer.write_entry::<::planus::Offset<[i64]>>(2);
                    }
                    if prepared_data_type.is_some() {
                        table_writer.write_entry::<i32>(3);
                    }
                    if prepared_raw_data.is_some() {
                        table_writer.write_entry::<::planus::Offset<[u8]>>(4);
                    }
                    if prepared_string_data.is_some() {
                        table_writer.write_entry::<::planus::Offset<[::planus::Offset<str>]>>(5);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_external_data_offset) =
                                prepared_external_data_offset
                            {
                                object_writer.write::<_, _, 8>(&prepared_external_data_offset);
                            }
                            if let ::core::option::Option::Some(prepared_name) = prepared_name {
                                object_writer.write::<_, _, 4>(&prepared_name);
                            }
                            if let ::core::option::Option::Some(prepared_doc_string) = prepared_doc_string {
                                object_writer.write::<_, _, 4>(&prepared_doc_string);
                            }
                            if let ::core::option::Option::Some(prepared_dims) = prepared_dims {
                                object_writer.write::<_, _, 4>(&prepared_dims);
                            }
                            if let ::core::option::Option::Some(prepared_data_type) = prepared_data_type {
                                object_writer.write::<_, _, 4>(&prepared_data_type);
                            }
                            if let ::core::option::Option::Some(prepared_raw_data) = prepared_raw_data {
                                object_writer.write::<_, _, 4>(&prepared_raw_data);
                            }
                            if let ::core::option::Option::Some(prepared_string_data) = prepared_string_data {
                                object_writer.write::<_, _, 4>(&prepared_string_data);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<Tensor>> for Tensor {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Tensor> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<Tensor>> for Tensor {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Tensor>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<Tensor> for Tensor {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Tensor> {
                    Tensor::create(
                        builder,
                        &self.name,
                        &self.doc_string,
                        &self.dims,
                        self.data_type,
                        &self.raw_data,
                        &self.string_data,
                        self.external_data_offset,
                    )
                }
            }

            /// Builder for serializing an instance of the [Tensor] type.
            ///
            /// Can be created using the [Tensor::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct TensorBuilder<State>(State);

            impl TensorBuilder<()> {
                /// Setter for the [`name` field](Tensor#structfield.name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name<T0>(self, value: T0) -> TensorBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    TensorBuilder((value,))
                }

                /// Sets the [`name` field](Tensor#structfield.name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name_as_null(self) -> TensorBuilder<((),)> {
                    self.name(())
                }
            }

            impl<T0> TensorBuilder<(T0,)> {
                /// Setter for the [`doc_string` field](Tensor#structfield.doc_string).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn doc_string<T1>(self, value: T1) -> TensorBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    let (v0,) = self.0;
                    TensorBuilder((v0, value))
                }

                /// Sets the [`doc_string` field](Tensor#structfield.doc_string) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn doc_string_as_null(self) -> TensorBuilder<(T0, ())> {
                    self.doc_string(())
                }
            }

            impl<T0, T1> TensorBuilder<(T0, T1)> {
                /// Setter for the [`dims` field](Tensor#structfield.dims).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn dims<T2>(self, value: T2) -> TensorBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsOptional<::planus::Offset<[i64]>>,
                {
                    let (v0, v1) = self.0;
                    TensorBuilder((v0, v1, value))
                }

                /// Sets the [`dims` field](Tensor#structfield.dims) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn dims_as_null(self) -> TensorBuilder<(T0, T1, ())> {
                    self.dims(())
                }
            }

            impl<T0, T1, T2> TensorBuilder<(T0, T1, T2)> {
                /// Setter for the [`data_type` field](Tensor#structfield.data_type).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_type<T3>(self, value: T3) -> TensorBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsDefault<i32, i32>,
                {
                    let (v0, v1, v2) = self.0;
                    TensorBuilder((v0, v1, v2, value))
                }

                /// Sets the [`data_type` field](Tensor#structfield.data_type) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_type_as_default(self) -> TensorBuilder<(T0, T1, T2, ::planus::DefaultValue)> {
                    self.data_type(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2, T3> TensorBuilder<(T0, T1, T2, T3)> {
                /// Setter for the [`raw_data` field](Tensor#structfield.raw_data).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn raw_data<T4>(self, value: T4) -> TensorBuilder<(T0, T1, T2, T3, T4)>
                where
                    T4: ::planus::WriteAsOptional<::planus::Offset<[u8]>>,
                {
                    let (v0, v1, v2, v3) = self.0;
                    TensorBuilder((v0, v1, v2, v3, value))
                }

                /// Sets the [`raw_data` field](Tensor#structfield.raw_data) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn raw_data_as_null(self) -> TensorBuilder<(T0, T1, T2, T3, ())> {
                    self.raw_data(())
                }
            }

            impl<T0, T1, T2, T3, T4> TensorBuilder<(T0, T1, T2, T3, T4)> {
                /// Setter for the [`string_data` field](Tensor#structfield.string_data).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn string_data<T5>(self, value: T5) -> TensorBuilder<(T0, T1, T2, T3, T4, T5)>
                where
                    T5: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<str>]>>,
                {
                    let (v0, v1, v2, v3, v4) = self.0;
                    TensorBuilder((v0, v1, v2, v3, v4, value))
                }

                /// Sets the [`string_data` field](Tensor#structfield.string_data) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn string_data_as_null(self) -> TensorBuilder<(T0, T1, T2, T3, T4, ())> {
                    self.string_data(())
                }
            }

            impl<T0, T1, T2, T3, T4, T5> TensorBuilder<(T0, T1, T2, T3, T4, T5)> {
                /// Setter for the [`external_data_offset` field](Tensor#structfield.external_data_offset).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn external_data_offset<T6>(
                    self,
                    value: T6,
                ) -> TensorBuilder<(T0, T1, T2, T3, T4, T5, T6)>
                where
                    T6: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0, v1, v2, v3, v4, v5) = self.0;
                    TensorBuilder((v0, v1, v2, v3, v4, v5, value))
                }

                /// Sets the [`external_data_offset` field](Tensor#structfield.external_data_offset) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn external_data_offset_as_default(
                    self,
                ) -> TensorBuilder<(T0, T1, T2, T3, T4, T5, ::planus::DefaultValue)> {
                    self.external_data_offset(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2, T3, T4, T5, T6> TensorBuilder<(T0, T1, T2, T3, T4, T5, T6)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [Tensor].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<Tensor>
                where
                    Self: ::planus::WriteAsOffset<Tensor>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[i64]>>,
                T3: ::planus::WriteAsDefault<i32, i32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<[u8]>>,
                T5: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<str>]>>,
                T6: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAs<::planus::Offset<Tensor>> for TensorBuilder<(T0, T1, T2, T3, T4, T5, T6)>
            {
                type Prepared = ::planus::Offset<Tensor>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Tensor> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[i64]>>,
                T3: ::planus::WriteAsDefault<i32, i32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<[u8]>>,
                T5: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<str>]>>,
                T6: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOptional<::planus::Offset<Tensor>>
                for TensorBuilder<(T0, T1, T2, T3, T4, T5, T6)>
            {
                type Prepared = ::planus::Offset<Tensor>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Tensor>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[i64]>>,
                T3: ::planus::WriteAsDefault<i32, i32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<[u8]>>,
                T5: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<str>]>>,
                T6: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOffset<Tensor> for TensorBuilder<(T0, T1, T2, T3, T4, T5, T6)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Tensor> {
                    let (v0, v1, v2, v3, v4, v5, v6) = &self.0;
                    Tensor::create(builder, v0, v1, v2, v3, v4, v5, v6)
                }
            }

            /// Reference to a deserialized [Tensor].
            #[derive(Copy, Clone)]
            pub struct TensorRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> TensorRef<'a> {
                /// Getter for the [`name` field](Tensor#structfield.name).
                #[inline]
                pub fn name(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "Tensor", "name")
                }

                /// Getter for the [`doc_string` field](Tensor#structfield.doc_string).
                #[inline]
                pub fn doc_string(
                    &self,
                ) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(1, "Tensor", "doc_string")
                }

                /// Getter for the [`dims` field](Tensor#structfield.dims).
                #[inline]
                pub fn dims(&self) -> ::planus::Result<::core::option::Option<::planus::Vector<'a, i64>>> {
                    self.0.access(2, "Tensor", "dims")
                }

                /// Getter for the [`data_type` field](Tensor#structfield.data_type).
                #[inline]
                pub fn data_type(&self) -> ::planus::Result<i32> {
                    ::core::result::Result::Ok(self.0.access(3, "Tensor", "data_type")?.unwrap_or(0))
                }

                /// Getter for the [`raw_data` field](Tensor#structfield.raw_data).
                #[inline]
                pub fn raw_data(&self) -> ::planus::Result<::core::option::Option<&'a [u8]>> {
                    self.0.access(4, "Tensor", "raw_data")
                }

                /// Getter for the [`string_data` field](Tensor#structfield.string_data).
                #[inline]
                pub fn string_data(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<
                        ::planus::Vector<'a, ::planus::Result<&'a ::core::primitive::str>>,
                    >,
                > {
                    self.0.access(5, "Tensor", "string_data")
                }

                /// Getter for the [`external_data_offset` field](Tensor#structfield.external_data_offset).
                #[inline]
                pub fn external_data_offset(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(
                        self.0.access(6, "Tensor", "external_data_offset")?.unwrap_or(-1),
                    )
                }
            }

            impl<'a> ::core::fmt::Debug for TensorRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("TensorRef");
                    if let ::core::option::Option::Some(field_name) = self.name().transpose() {
                        f.field("name", &field_name);
                    }
                    if let ::core::option::Option::Some(field_doc_string) = self.doc_string().transpose() {
                        f.field("doc_string", &field_doc_string);
                    }
                    if let ::core::option::Option::Some(field_dims) = self.dims().transpose() {
                        f.field("dims", &field_dims);
                    }
                    f.field("data_type", &self.data_type());
                    if let ::core::option::Option::Some(field_raw_data) = self.raw_data().transpose() {
                        f.field("raw_data", &field_raw_data);
                    }
                    if let ::core::option::Option::Some(field_string_data) = self.string_data().transpose() {
                        f.field("string_data", &field_string_data);
                    }
                    f.field("external_data_offset", &self.external_data_offset());
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<TensorRef<'a>> for Tensor {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: TensorRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        name: value.name()?.map(::core::convert::Into::into),
                        doc_string: value.doc_string()?.map(::core::convert::Into::into),
                        dims: if let ::core::option::Option::Some(dims) = value.dims()? {
                            ::core::option::Option::Some(dims.to_vec()?)
                        } else {
                            ::core::option::Option::None
                        },
                        data_type: ::core::convert::TryInto::try_into(value.data_type()?)?,
                        raw_data: value.raw_data()?.map(|v| v.to_vec()),
                        string_data: if let ::core::option::Option::Some(string_data) = value.string_data()? {
                            ::core::option::Option::Some(string_data.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        external_data_offset: ::core::convert::TryInto::try_into(
                            value.external_data_offset()?,
                        )?,
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for TensorRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for TensorRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[TensorRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<Tensor>> for Tensor {
                type Value = ::planus::Offset<Tensor>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<Tensor>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for TensorRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| error_kind.with_error_location("[TensorRef]", "read_as_root", 0))
                }
            }

            /// The table `ModuleState` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `ModuleState` in the file `schema/checkpoint.fbs:19`
            #[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord, Hash)]
            pub struct ModuleState {
                /// The field `requires_grad_params` in the table `ModuleState`
                pub requires_grad_params: ::core::option::Option<::planus::alloc::vec::Vec<self::Tensor>>,
                /// The field `frozen_params` in the table `ModuleState`
                pub frozen_params: ::core::option::Option<::planus::alloc::vec::Vec<self::Tensor>>,
                /// The field `is_nominal_state` in the table `ModuleState`
                pub is_nominal_state: bool,
                /// The field `has_external_data` in the table `ModuleState`
                pub has_external_data: bool,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for ModuleState {
                fn default() -> Self {
                    Self {
                        requires_grad_params: ::core::default::Default::default(),
                        frozen_params: ::core::default::Default::default(),
                        is_nominal_state: false,
                        has_external_data: false,
                    }
                }
            }

            impl ModuleState {
                /// Creates a [ModuleStateBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> ModuleStateBuilder<()> {
                    ModuleStateBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_requires_grad_params: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::Tensor>]>,
                    >,
                    field_frozen_params: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::Tensor>]>,
                    >,
                    field_is_nominal_state: impl ::planus::WriteAsDefault<bool, bool>,
                    field_has_external_data: impl ::planus::WriteAsDefault<bool, bool>,
                ) -> ::planus::Offset<Self> {
                    let prepared_requires_grad_params = field_requires_grad_params.prepare(builder);
                    let prepared_frozen_params = field_frozen_params.prepare(builder);
                    let prepared_is_nominal_state = field_is_nominal_state.prepare(builder, &false);
                    let prepared_has_external_data = field_has_external_data.prepare(builder, &false);

                    let mut table_writer: ::planus::table_writer::TableWriter<12> =
                        ::core::default::Default::default();
                    if prepared_requires_grad_params.is_some() {
                        table_writer.write_entry::<::planus::Offset<[::planus::Offset<self::Tensor>]>>(0);
                    }
                    if prepared_frozen_params.is_some() {
                        table_writer.write_entry::<::planus::Offset<[::planus::Offset<self::Tensor>]>>(1);
                    }
                    if prepared_is_nominal_state.is_some() {
                        table_writer.write_entry::<bool>(2);
                    }
                    if prepared_has_external_data.is_some() {
                        table_writer.write_entry::<bool>(3);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_requires_grad_params) =
                                prepared_requires_grad_params
                            {
                                object_writer.write::<_, _, 4>(&prepared_requires_grad_params);
                            }
                            if let ::core::option::Option::Some(prepared_frozen_params) =
                                prepared_frozen_params
                            {
                                object_writer.write::<_, _, 4>(&prepared_frozen_params);
                            }
                            if let ::core::option::Option::Some(prepared_is_nominal_state) =
                                prepared_is_nominal_state
                            {
                                object_writer.write::<_, _, 1>(&prepared_is_nominal_state);
                            }
                            if let ::core::option::Option::Some(prepared_has_external_data) =
                                prepared_has_external_data
                            {
                                object_writer.write::<_, _, 1>(&prepared_has_external_data);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<ModuleState>> for ModuleState {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<ModuleState> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<ModuleState>> for ModuleState {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<ModuleState>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<ModuleState> for ModuleState {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<ModuleState> {
                    ModuleState::create(
                        builder,
                        &self.requires_grad_params,
                        &self.frozen_params,
                        self.is_nominal_state,
                        self.has_external_data,
                    )
                }
            }

            /// Builder for serializing an instance of the [ModuleState] type.
            ///
            /// Can be created using the [ModuleState::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct ModuleStateBuilder<State>(State);

            impl ModuleStateBuilder<()> {
                /// Setter for the [`requires_grad_params` field](ModuleState#structfield.requires_grad_params).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn requires_grad_params<T0>(self, value: T0) -> ModuleStateBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                {
                    ModuleStateBuilder((value,))
                }

                /// Sets the [`requires_grad_params` field](ModuleState#structfield.requires_grad_params) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn requires_grad_params_as_null(self) -> ModuleStateBuilder<((),)> {
                    self.requires_grad_params(())
                }
            }

            impl<T0> ModuleStateBuilder<(T0,)> {
                /// Setter for the [`frozen_params` field](ModuleState#structfield.frozen_params).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn frozen_params<T1>(self, value: T1) -> ModuleStateBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                {
                    let (v0,) = self.0;
                    ModuleStateBuilder((v0, value))
                }

                /// Sets the [`frozen_params` field](ModuleState#structfield.frozen_params) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn frozen_params_as_null(self) -> ModuleStateBuilder<(T0, ())> {
                    self.frozen_params(())
                }
            }

            impl<T0, T1> ModuleStateBuilder<(T0, T1)> {
                /// Setter for the [`is_nominal_state` field](ModuleState#structfield.is_nominal_state).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn is_nominal_state<T2>(self, value: T2) -> ModuleStateBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsDefault<bool, bool>,
                {
                    let (v0, v1) = self.0;
                    ModuleStateBuilder((v0, v1, value))
                }

                /// Sets the [`is_nominal_state` field](ModuleState#structfield.is_nominal_state) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn is_nominal_state_as_default(
                    self,
                ) -> ModuleStateBuilder<(T0, T1, ::planus::DefaultValue)> {
                    self.is_nominal_state(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2> ModuleStateBuilder<(T0, T1, T2)> {
                /// Setter for the [`has_external_data` field](ModuleState#structfield.has_external_data).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn has_external_data<T3>(self, value: T3) -> ModuleStateBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsDefault<bool, bool>,
                {
                    let (v0, v1, v2) = self.0;
                    ModuleStateBuilder((v0, v1, v2, value))
                }

                /// Sets the [`has_external_data` field](ModuleState#structfield.has_external_data) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn has_external_data_as_default(
                    self,
                ) -> ModuleStateBuilder<(T0, T1, T2, ::planus::DefaultValue)> {
                    self.has_external_data(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2, T3> ModuleStateBuilder<(T0, T1, T2, T3)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [ModuleState].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<ModuleState>
                where
                    Self: ::planus::WriteAsOffset<ModuleState>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T2: ::planus::WriteAsDefault<bool, bool>,
                T3: ::planus::WriteAsDefault<bool, bool>,
            > ::planus::WriteAs<::planus::Offset<ModuleState>> for ModuleStateBuilder<(T0, T1, T2, T3)>
            {
                type Prepared = ::planus::Offset<ModuleState>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<ModuleState> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T2: ::planus::WriteAsDefault<bool, bool>,
                T3: ::planus::WriteAsDefault<bool, bool>,
            > ::planus::WriteAsOptional<::planus::Offset<ModuleState>>
                for ModuleStateBuilder<(T0, T1, T2, T3)>
            {
                type Prepared = ::planus::Offset<ModuleState>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<ModuleState>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                T2: ::planus::WriteAsDefault<bool, bool>,
                T3: ::planus::WriteAsDefault<bool, bool>,
            > ::planus::WriteAsOffset<ModuleState> for ModuleStateBuilder<(T0, T1, T2, T3)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<ModuleState> {
                    let (v0, v1, v2, v3) = &self.0;
                    ModuleState::create(builder, v0, v1, v2, v3)
                }
            }

            /// Reference to a deserialized [ModuleState].
            #[derive(Copy, Clone)]
            pub struct ModuleStateRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> ModuleStateRef<'a> {
                /// Getter for the [`requires_grad_params` field](ModuleState#structfield.requires_grad_params).
                #[inline]
                pub fn requires_grad_params(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<::planus::Vector<'a, ::planus::Result<self::TensorRef<'a>>>>,
                > {
                    self.0.access(0, "ModuleState", "requires_grad_params")
                }

                /// Getter for the [`frozen_params` field](ModuleState#structfield.frozen_params).
                #[inline]
                pub fn frozen_params(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<::planus::Vector<'a, ::planus::Result<self::TensorRef<'a>>>>,
                > {
                    self.0.access(1, "ModuleState", "frozen_params")
                }

                /// Getter for the [`is_nominal_state` field](ModuleState#structfield.is_nominal_state).
                #[inline]
                pub fn is_nominal_state(&self) -> ::planus::Result<bool> {
                    ::core::result::Result::Ok(
                        self.0.access(2, "ModuleState", "is_nominal_state")?.unwrap_or(false),
                    )
                }

                /// Getter for the [`has_external_data` field](ModuleState#structfield.has_external_data).
                #[inline]
                pub fn has_external_data(&self) -> ::planus::Result<bool> {
                    ::core::result::Result::Ok(
                        self.0.access(3, "ModuleState", "has_external_data")?.unwrap_or(false),
                    )
                }
            }

            impl<'a> ::core::fmt::Debug for ModuleStateRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("ModuleStateRef");
                    if let ::core::option::Option::Some(field_requires_grad_params) =
                        self.requires_grad_params().transpose()
                    {
                        f.field("requires_grad_params", &field_requires_grad_params);
                    }
                    if let ::core::option::Option::Some(field_frozen_params) =
                        self.frozen_params().transpose()
                    {
                        f.field("frozen_params", &field_frozen_params);
                    }
                    f.field("is_nominal_state", &self.is_nominal_state());
                    f.field("has_external_data", &self.has_external_data());
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<ModuleStateRef<'a>> for ModuleState {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: ModuleStateRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        requires_grad_params: if let ::core::option::Option::Some(requires_grad_params) =
                            value.requires_grad_params()?
                        {
                            ::core::option::Option::Some(requires_grad_params.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        frozen_params: if let ::core::option::Option::Some(frozen_params) =
                            value.frozen_params()?
                        {
                            ::core::option::Option::Some(frozen_params.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        is_nominal_state: ::core::convert::TryInto::try_into(value.is_nominal_state()?)?,
                        has_external_data: ::core::convert::TryInto::try_into(value.has_external_data()?)?,
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for ModuleStateRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for ModuleStateRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[ModuleStateRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<ModuleState>> for ModuleState {
                type Value = ::planus::Offset<ModuleState>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<ModuleState>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for ModuleStateRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[ModuleStateRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `ParameterOptimizerState` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `ParameterOptimizerState` in the file `schema/checkpoint.fbs:26`
            #[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord, Hash)]
            pub struct ParameterOptimizerState {
                /// The field `param_name` in the table `ParameterOptimizerState`
                pub param_name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `momentums` in the table `ParameterOptimizerState`
                pub momentums: ::core::option::Option<::planus::alloc::vec::Vec<self::Tensor>>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for ParameterOptimizerState {
                fn default() -> Self {
                    Self {
                        param_name: ::core::default::Default::default(),
                        momentums: ::core::default::Default::default(),
                    }
                }
            }

            impl ParameterOptimizerState {
                /// Creates a [ParameterOptimizerStateBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> ParameterOptimizerStateBuilder<()> {
                    ParameterOptimizerStateBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_param_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_momentums: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::Tensor>]>,
                    >,
                ) -> ::planus::Offset<Self> {
                    let prepared_param_name = field_param_name.prepare(builder);
                    let prepared_momentums = field_momentums.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<8> =
                        ::core::default::Default::default();
                    if prepared_param_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_momentums.is_some() {
                        table_writer.write_entry::<::planus::Offset<[::planus::Offset<self::Tensor>]>>(1);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_param_name) = prepared_param_name {
                                object_writer.write::<_, _, 4>(&prepared_param_name);
                            }
                            if let ::core::option::Option::Some(prepared_momentums) = prepared_momentums {
                                object_writer.write::<_, _, 4>(&prepared_momentums);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<ParameterOptimizerState>> for ParameterOptimizerState {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::planus::Offset<ParameterOptimizerState> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<ParameterOptimizerState>> for ParameterOptimizerState {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<ParameterOptimizerState>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<ParameterOptimizerState> for ParameterOptimizerState {
                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::planus::Offset<ParameterOptimizerState> {
                    ParameterOptimizerState::create(builder, &self.param_name, &self.momentums)
                }
            }

            /// Builder for serializing an instance of the [ParameterOptimizerState] type.
            ///
            /// Can be created using the [ParameterOptimizerState::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct ParameterOptimizerStateBuilder<State>(State);

            impl ParameterOptimizerStateBuilder<()> {
                /// Setter for the [`param_name` field](ParameterOptimizerState#structfield.param_name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn param_name<T0>(self, value: T0) -> ParameterOptimizerStateBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    ParameterOptimizerStateBuilder((value,))
                }

                /// Sets the [`param_name` field](ParameterOptimizerState#structfield.param_name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn param_name_as_null(self) -> ParameterOptimizerStateBuilder<((),)> {
                    self.param_name(())
                }
            }

            impl<T0> ParameterOptimizerStateBuilder<(T0,)> {
                /// Setter for the [`momentums` field](ParameterOptimizerState#structfield.momentums).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn momentums<T1>(self, value: T1) -> ParameterOptimizerStateBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
                {
                    let (v0,) = self.0;
                    ParameterOptimizerStateBuilder((v0, value))
                }

                /// Sets the [`momentums` field](ParameterOptimizerState#structfield.momentums) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn momentums_as_null(self) -> ParameterOptimizerStateBuilder<(T0, ())> {
                    self.momentums(())
                }
            }

            impl<T0, T1> ParameterOptimizerStateBuilder<(T0, T1)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [ParameterOptimizerState].
                #[inline]
                pub fn finish(
                    self,
                    builder: &mut ::planus::Builder,
                ) -> ::planus::Offset<ParameterOptimizerState>
                where
                    Self: ::planus::WriteAsOffset<ParameterOptimizerState>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
            > ::planus::WriteAs<::planus::Offset<ParameterOptimizerState>>
                for ParameterOptimizerStateBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<ParameterOptimizerState>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::planus::Offset<ParameterOptimizerState> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
            > ::planus::WriteAsOptional<::planus::Offset<ParameterOptimizerState>>
                for ParameterOptimizerStateBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<ParameterOptimizerState>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<ParameterOptimizerState>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::Tensor>]>>,
            > ::planus::WriteAsOffset<ParameterOptimizerState> for ParameterOptimizerStateBuilder<(T0, T1)>
            {
                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::planus::Offset<ParameterOptimizerState> {
                    let (v0, v1) = &self.0;
                    ParameterOptimizerState::create(builder, v0, v1)
                }
            }

            /// Reference to a deserialized [ParameterOptimizerState].
            #[derive(Copy, Clone)]
            pub struct ParameterOptimizerStateRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> ParameterOptimizerStateRef<'a> {
                /// Getter for the [`param_name` field](ParameterOptimizerState#structfield.param_name).
                #[inline]
                pub fn param_name(
                    &self,
                ) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "ParameterOptimizerState", "param_name")
                }

                /// Getter for the [`momentums` field](ParameterOptimizerState#structfield.momentums).
                #[inline]
                pub fn momentums(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<::planus::Vector<'a, ::planus::Result<self::TensorRef<'a>>>>,
                > {
                    self.0.access(1, "ParameterOptimizerState", "momentums")
                }
            }

            impl<'a> ::core::fmt::Debug for ParameterOptimizerStateRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("ParameterOptimizerStateRef");
                    if let ::core::option::Option::Some(field_param_name) = self.param_name().transpose() {
                        f.field("param_name", &field_param_name);
                    }
                    if let ::core::option::Option::Some(field_momentums) = self.momentums().transpose() {
                        f.field("momentums", &field_momentums);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<ParameterOptimizerStateRef<'a>> for ParameterOptimizerState {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: ParameterOptimizerStateRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        param_name: value.param_name()?.map(::core::convert::Into::into),
                        momentums: if let ::core::option::Option::Some(momentums) = value.momentums()? {
                            ::core::option::Option::Some(momentums.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for ParameterOptimizerStateRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for ParameterOptimizerStateRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location(
                            "[ParameterOptimizerStateRef]",
                            "get",
                            buffer.offset_from_start,
                        )
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<ParameterOptimizerState>> for ParameterOptimizerState {
                type Value = ::planus::Offset<ParameterOptimizerState>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<ParameterOptimizerState>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for ParameterOptimizerStateRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[ParameterOptimizerStateRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `OptimizerGroup` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `OptimizerGroup` in the file `schema/checkpoint.fbs:31`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct OptimizerGroup {
                /// The field `group_name` in the table `OptimizerGroup`
                pub group_name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `step` in the table `OptimizerGroup`
                pub step: i64,
                /// The field `initial_learning_rate` in the table `OptimizerGroup`
                pub initial_learning_rate: ::core::option::Option<f32>,
                /// The field `optimizer_states` in the table `OptimizerGroup`
                pub optimizer_states:
                    ::core::option::Option<::planus::alloc::vec::Vec<self::ParameterOptimizerState>>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for OptimizerGroup {
                fn default() -> Self {
                    Self {
                        group_name: ::core::default::Default::default(),
                        step: 0,
                        initial_learning_rate: ::core::default::Default::default(),
                        optimizer_states: ::core::default::Default::default(),
                    }
                }
            }

            impl OptimizerGroup {
                /// Creates a [OptimizerGroupBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> OptimizerGroupBuilder<()> {
                    OptimizerGroupBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_group_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_step: impl ::planus::WriteAsDefault<i64, i64>,
                    field_initial_learning_rate: impl ::planus::WriteAsOptional<f32>,
                    field_optimizer_states: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>,
                    >,
                ) -> ::planus::Offset<Self> {
                    let prepared_group_name = field_group_name.prepare(builder);
                    let prepared_step = field_step.prepare(builder, &0);
                    let prepared_initial_learning_rate = field_initial_learning_rate.prepare(builder);
                    let prepared_optimizer_states = field_optimizer_states.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<12> =
                        ::core::default::Default::default();
                    if prepared_step.is_some() {
                        table_writer.write_entry::<i64>(1);
                    }
                    if prepared_group_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_initial_learning_rate.is_some() {
                        table_writer.write_entry::<f32>(2);
                    }
                    if prepared_optimizer_states.is_some() {
                        table_writer.write_entry::<::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>>(3);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_step) = prepared_step {
                                object_writer.write::<_, _, 8>(&prepared_step);
                            }
                            if let ::core::option::Option::Some(prepared_group_name) = prepared_group_name {
                                object_writer.write::<_, _, 4>(&prepared_group_name);
                            }
                            if let ::core::option::Option::Some(prepared_initial_learning_rate) =
                                prepared_initial_learning_rate
                            {
                                object_writer.write::<_, _, 4>(&prepared_initial_learning_rate);
                            }
                            if let ::core::option::Option::Some(prepared_optimizer_states) =
                                prepared_optimizer_states
                            {
                                object_writer.write::<_, _, 4>(&prepared_optimizer_states);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<OptimizerGroup>> for OptimizerGroup {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<OptimizerGroup> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<OptimizerGroup>> for OptimizerGroup {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<OptimizerGroup>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<OptimizerGroup> for OptimizerGroup {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<OptimizerGroup> {
                    OptimizerGroup::create(
                        builder,
                        &self.group_name,
                        self.step,
                        self.initial_learning_rate,
                        &self.optimizer_states,
                    )
                }
            }

            /// Builder for serializing an instance of the [OptimizerGroup] type.
            ///
            /// Can be created using the [OptimizerGroup::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct OptimizerGroupBuilder<State>(State);

            impl OptimizerGroupBuilder<()> {
                /// Setter for the [`group_name` field](OptimizerGroup#structfield.group_name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn group_name<T0>(self, value: T0) -> OptimizerGroupBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    OptimizerGroupBuilder((value,))
                }

                /// Sets the [`group_name` field](OptimizerGroup#structfield.group_name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn group_name_as_null(self) -> OptimizerGroupBuilder<((),)> {
                    self.group_name(())
                }
            }

            impl<T0> OptimizerGroupBuilder<(T0,)> {
                /// Setter for the [`step` field](OptimizerGroup#structfield.step).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn step<T1>(self, value: T1) -> OptimizerGroupBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0,) = self.0;
                    OptimizerGroupBuilder((v0, value))
                }

                /// Sets the [`step` field](OptimizerGroup#structfield.step) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn step_as_default(self) -> OptimizerGroupBuilder<(T0, ::planus::DefaultValue)> {
                    self.step(::planus::DefaultValue)
                }
            }

            impl<T0, T1> OptimizerGroupBuilder<(T0, T1)> {
                /// Setter for the [`initial_learning_rate` field](OptimizerGroup#structfield.initial_learning_rate).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn initial_learning_rate<T2>(self, value: T2) -> OptimizerGroupBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsOptional<f32>,
                {
                    let (v0, v1) = self.0;
                    OptimizerGroupBuilder((v0, v1, value))
                }

                /// Sets the [`initial_learning_rate` field](OptimizerGroup#structfield.initial_learning_rate) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn initial_learning_rate_as_null(self) -> OptimizerGroupBuilder<(T0, T1, ())> {
                    self.initial_learning_rate(())
                }
            }

            impl<T0, T1, T2> OptimizerGroupBuilder<(T0, T1, T2)> {
                /// Setter for the [`optimizer_states` field](OptimizerGroup#structfield.optimizer_states).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer_states<T3>(self, value: T3) -> OptimizerGroupBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsOptional<
                            ::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>,
                        >,
                {
                    let (v0, v1, v2) = self.0;
                    OptimizerGroupBuilder((v0, v1, v2, value))
                }

                /// Sets the [`optimizer_states` field](OptimizerGroup#structfield.optimizer_states) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer_states_as_null(self) -> OptimizerGroupBuilder<(T0, T1, T2, ())> {
                    self.optimizer_states(())
                }
            }

            impl<T0, T1, T2, T3> OptimizerGroupBuilder<(T0, T1, T2, T3)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [OptimizerGroup].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<OptimizerGroup>
                where
                    Self: ::planus::WriteAsOffset<OptimizerGroup>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsOptional<f32>,
                T3: ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>,
                    >,
            > ::planus::WriteAs<::planus::Offset<OptimizerGroup>>
                for OptimizerGroupBuilder<(T0, T1, T2, T3)>
            {
                type Prepared = ::planus::Offset<OptimizerGroup>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<OptimizerGroup> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsOptional<f32>,
                T3: ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>,
                    >,
            > ::planus::WriteAsOptional<::planus::Offset<OptimizerGroup>>
                for OptimizerGroupBuilder<(T0, T1, T2, T3)>
            {
                type Prepared = ::planus::Offset<OptimizerGroup>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<OptimizerGroup>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsOptional<f32>,
                T3: ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::ParameterOptimizerState>]>,
                    >,
            > ::planus::WriteAsOffset<OptimizerGroup> for OptimizerGroupBuilder<(T0, T1, T2, T3)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<OptimizerGroup> {
                    let (v0, v1, v2, v3) = &self.0;
                    OptimizerGroup::create(builder, v0, v1, v2, v3)
                }
            }

            /// Reference to a deserialized [OptimizerGroup].
            #[derive(Copy, Clone)]
            pub struct OptimizerGroupRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> OptimizerGroupRef<'a> {
                /// Getter for the [`group_name` field](OptimizerGroup#structfield.group_name).
                #[inline]
                pub fn group_name(
                    &self,
                ) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "OptimizerGroup", "group_name")
                }

                /// Getter for the [`step` field](OptimizerGroup#structfield.step).
                #[inline]
                pub fn step(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(self.0.access(1, "OptimizerGroup", "step")?.unwrap_or(0))
                }

                /// Getter for the [`initial_learning_rate` field](OptimizerGroup#structfield.initial_learning_rate).
                #[inline]
                pub fn initial_learning_rate(&self) -> ::planus::Result<::core::option::Option<f32>> {
                    self.0.access(2, "OptimizerGroup", "initial_learning_rate")
                }

                /// Getter for the [`optimizer_states` field](OptimizerGroup#structfield.optimizer_states).
                #[inline]
                pub fn optimizer_states(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<
                        ::planus::Vector<'a, ::planus::Result<self::ParameterOptimizerStateRef<'a>>>,
                    >,
                > {
                    self.0.access(3, "OptimizerGroup", "optimizer_states")
                }
            }

            impl<'a> ::core::fmt::Debug for OptimizerGroupRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("OptimizerGroupRef");
                    if let ::core::option::Option::Some(field_group_name) = self.group_name().transpose() {
                        f.field("group_name", &field_group_name);
                    }
                    f.field("step", &self.step());
                    if let ::core::option::Option::Some(field_initial_learning_rate) =
                        self.initial_learning_rate().transpose()
                    {
                        f.field("initial_learning_rate", &field_initial_learning_rate);
                    }
                    if let ::core::option::Option::Some(field_optimizer_states) =
                        self.optimizer_states().transpose()
                    {
                        f.field("optimizer_states", &field_optimizer_states);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<OptimizerGroupRef<'a>> for OptimizerGroup {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: OptimizerGroupRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        group_name: value.group_name()?.map(::core::convert::Into::into),
                        step: ::core::convert::TryInto::try_into(value.step()?)?,
                        initial_learning_rate: if let ::core::option::Option::Some(initial_learning_rate) =
                            value.initial_learning_rate()?
                        {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(
                                initial_learning_rate,
                            )?)
                        } else {
                            ::core::option::Option::None
                        },
                        optimizer_states: if let ::core::option::Option::Some(optimizer_states) =
                            value.optimizer_states()?
                        {
                            ::core::option::Option::Some(optimizer_states.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for OptimizerGroupRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for OptimizerGroupRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[OptimizerGroupRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<OptimizerGroup>> for OptimizerGroup {
                type Value = ::planus::Offset<OptimizerGroup>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<OptimizerGroup>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for OptimizerGroupRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[OptimizerGroupRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `IntProperty` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `IntProperty` in the file `schema/checkpoint.fbs:38`
            #[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord, Hash)]
            pub struct IntProperty {
                /// The field `name` in the table `IntProperty`
                pub name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `value` in the table `IntProperty`
                pub value: i64,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for IntProperty {
                fn default() -> Self {
                    Self { name: ::core::default::Default::default(), value: 0 }
                }
            }

            impl IntProperty {
                /// Creates a [IntPropertyBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> IntPropertyBuilder<()> {
                    IntPropertyBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_value: impl ::planus::WriteAsDefault<i64, i64>,
                ) -> ::planus::Offset<Self> {
                    let prepared_name = field_name.prepare(builder);
                    let prepared_value = field_value.prepare(builder, &0);

                    let mut table_writer: ::planus::table_writer::TableWriter<8> =
                        ::core::default::Default::default();
                    if prepared_value.is_some() {
                        table_writer.write_entry::<i64>(1);
                    }
                    if prepared_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_value) = prepared_value {
                                object_writer.write::<_, _, 8>(&prepared_value);
                            }
                            if let ::core::option::Option::Some(prepared_name) = prepared_name {
                                object_writer.write::<_, _, 4>(&prepared_name);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<IntProperty>> for IntProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<IntProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<IntProperty>> for IntProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<IntProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<IntProperty> for IntProperty {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<IntProperty> {
                    IntProperty::create(builder, &self.name, self.value)
                }
            }

            /// Builder for serializing an instance of the [IntProperty] type.
            ///
            /// Can be created using the [IntProperty::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct IntPropertyBuilder<State>(State);

            impl IntPropertyBuilder<()> {
                /// Setter for the [`name` field](IntProperty#structfield.name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name<T0>(self, value: T0) -> IntPropertyBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    IntPropertyBuilder((value,))
                }

                /// Sets the [`name` field](IntProperty#structfield.name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name_as_null(self) -> IntPropertyBuilder<((),)> {
                    self.name(())
                }
            }

            impl<T0> IntPropertyBuilder<(T0,)> {
                /// Setter for the [`value` field](IntProperty#structfield.value).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value<T1>(self, value: T1) -> IntPropertyBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0,) = self.0;
                    IntPropertyBuilder((v0, value))
                }

                /// Sets the [`value` field](IntProperty#structfield.value) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value_as_default(self) -> IntPropertyBuilder<(T0, ::planus::DefaultValue)> {
                    self.value(::planus::DefaultValue)
                }
            }

            impl<T0, T1> IntPropertyBuilder<(T0, T1)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [IntProperty].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<IntProperty>
                where
                    Self: ::planus::WriteAsOffset<IntProperty>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAs<::planus::Offset<IntProperty>> for IntPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<IntProperty>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<IntProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOptional<::planus::Offset<IntProperty>> for IntPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<IntProperty>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<IntProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOffset<IntProperty> for IntPropertyBuilder<(T0, T1)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<IntProperty> {
                    let (v0, v1) = &self.0;
                    IntProperty::create(builder, v0, v1)
                }
            }

            /// Reference to a deserialized [IntProperty].
            #[derive(Copy, Clone)]
            pub struct IntPropertyRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> IntPropertyRef<'a> {
                /// Getter for the [`name` field](IntProperty#structfield.name).
                #[inline]
                pub fn name(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "IntProperty", "name")
                }

                /// Getter for the [`value` field](IntProperty#structfield.value).
                #[inline]
                pub fn value(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(self.0.access(1, "IntProperty", "value")?.unwrap_or(0))
                }
            }

            impl<'a> ::core::fmt::Debug for IntPropertyRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("IntPropertyRef");
                    if let ::core::option::Option::Some(field_name) = self.name().transpose() {
                        f.field("name", &field_name);
                    }
                    f.field("value", &self.value());
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<IntPropertyRef<'a>> for IntProperty {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: IntPropertyRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        name: value.name()?.map(::core::convert::Into::into),
                        value: ::core::convert::TryInto::try_into(value.value()?)?,
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for IntPropertyRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for IntPropertyRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[IntPropertyRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<IntProperty>> for IntProperty {
                type Value = ::planus::Offset<IntProperty>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<IntProperty>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for IntPropertyRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[IntPropertyRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `FloatProperty` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `FloatProperty` in the file `schema/checkpoint.fbs:43`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct FloatProperty {
                /// The field `name` in the table `FloatProperty`
                pub name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `value` in the table `FloatProperty`
                pub value: ::core::option::Option<f32>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for FloatProperty {
                fn default() -> Self {
                    Self {
                        name: ::core::default::Default::default(),
                        value: ::core::default::Default::default(),
                    }
                }
            }

            impl FloatProperty {
                /// Creates a [FloatPropertyBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> FloatPropertyBuilder<()> {
                    FloatPropertyBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_value: impl ::planus::WriteAsOptional<f32>,
                ) -> ::planus::Offset<Self> {
                    let prepared_name = field_name.prepare(builder);
                    let prepared_value = field_value.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<8> =
                        ::core::default::Default::default();
                    if prepared_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_value.is_some() {
                        table_writer.write_entry::<f32>(1);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_name) = prepared_name {
                                object_writer.write::<_, _, 4>(&prepared_name);
                            }
                            if let ::core::option::Option::Some(prepared_value) = prepared_value {
                                object_writer.write::<_, _, 4>(&prepared_value);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<FloatProperty>> for FloatProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<FloatProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<FloatProperty>> for FloatProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<FloatProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<FloatProperty> for FloatProperty {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<FloatProperty> {
                    FloatProperty::create(builder, &self.name, self.value)
                }
            }

            /// Builder for serializing an instance of the [FloatProperty] type.
            ///
            /// Can be created using the [FloatProperty::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct FloatPropertyBuilder<State>(State);

            impl FloatPropertyBuilder<()> {
                /// Setter for the [`name` field](FloatProperty#structfield.name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name<T0>(self, value: T0) -> FloatPropertyBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    FloatPropertyBuilder((value,))
                }

                /// Sets the [`name` field](FloatProperty#structfield.name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name_as_null(self) -> FloatPropertyBuilder<((),)> {
                    self.name(())
                }
            }

            impl<T0> FloatPropertyBuilder<(T0,)> {
                /// Setter for the [`value` field](FloatProperty#structfield.value).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value<T1>(self, value: T1) -> FloatPropertyBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<f32>,
                {
                    let (v0,) = self.0;
                    FloatPropertyBuilder((v0, value))
                }

                /// Sets the [`value` field](FloatProperty#structfield.value) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value_as_null(self) -> FloatPropertyBuilder<(T0, ())> {
                    self.value(())
                }
            }

            impl<T0, T1> FloatPropertyBuilder<(T0, T1)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [FloatProperty].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<FloatProperty>
                where
                    Self: ::planus::WriteAsOffset<FloatProperty>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<f32>,
            > ::planus::WriteAs<::planus::Offset<FloatProperty>> for FloatPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<FloatProperty>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<FloatProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<f32>,
            > ::planus::WriteAsOptional<::planus::Offset<FloatProperty>> for FloatPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<FloatProperty>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<FloatProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<f32>,
            > ::planus::WriteAsOffset<FloatProperty> for FloatPropertyBuilder<(T0, T1)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<FloatProperty> {
                    let (v0, v1) = &self.0;
                    FloatProperty::create(builder, v0, v1)
                }
            }

            /// Reference to a deserialized [FloatProperty].
            #[derive(Copy, Clone)]
            pub struct FloatPropertyRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> FloatPropertyRef<'a> {
                /// Getter for the [`name` field](FloatProperty#structfield.name).
                #[inline]
                pub fn name(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "FloatProperty", "name")
                }

                /// Getter for the [`value` field](FloatProperty#structfield.value).
                #[inline]
                pub fn value(&self) -> ::planus::Result<::core::option::Option<f32>> {
                    self.0.access(1, "FloatProperty", "value")
                }
            }

            impl<'a> ::core::fmt::Debug for FloatPropertyRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("FloatPropertyRef");
                    if let ::core::option::Option::Some(field_name) = self.name().transpose() {
                        f.field("name", &field_name);
                    }
                    if let ::core::option::Option::Some(field_value) = self.value().transpose() {
                        f.field("value", &field_value);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<FloatPropertyRef<'a>> for FloatProperty {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: FloatPropertyRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        name: value.name()?.map(::core::convert::Into::into),
                        value: if let ::core::option::Option::Some(value) = value.value()? {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(value)?)
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for FloatPropertyRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for FloatPropertyRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[FloatPropertyRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<FloatProperty>> for FloatProperty {
                type Value = ::planus::Offset<FloatProperty>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<FloatProperty>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for FloatPropertyRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[FloatPropertyRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `StringProperty` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `StringProperty` in the file `schema/checkpoint.fbs:48`
            #[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord, Hash)]
            pub struct StringProperty {
                /// The field `name` in the table `StringProperty`
                pub name: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `value` in the table `StringProperty`
                pub value: ::core::option::Option<::planus::alloc::string::String>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for StringProperty {
                fn default() -> Self {
                    Self {
                        name: ::core::default::Default::default(),
                        value: ::core::default::Default::default(),
                    }
                }
            }

            impl StringProperty {
                /// Creates a [StringPropertyBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> StringPropertyBuilder<()> {
                    StringPropertyBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_name: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_value: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                ) -> ::planus::Offset<Self> {
                    let prepared_name = field_name.prepare(builder);
                    let prepared_value = field_value.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<8> =
                        ::core::default::Default::default();
                    if prepared_name.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_value.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(1);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_name) = prepared_name {
                                object_writer.write::<_, _, 4>(&prepared_name);
                            }
                            if let ::core::option::Option::Some(prepared_value) = prepared_value {
                                object_writer.write::<_, _, 4>(&prepared_value);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<StringProperty>> for StringProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<StringProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<StringProperty>> for StringProperty {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<StringProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<StringProperty> for StringProperty {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<StringProperty> {
                    StringProperty::create(builder, &self.name, &self.value)
                }
            }

            /// Builder for serializing an instance of the [StringProperty] type.
            ///
            /// Can be created using the [StringProperty::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct StringPropertyBuilder<State>(State);

            impl StringPropertyBuilder<()> {
                /// Setter for the [`name` field](StringProperty#structfield.name).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name<T0>(self, value: T0) -> StringPropertyBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    StringPropertyBuilder((value,))
                }

                /// Sets the [`name` field](StringProperty#structfield.name) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn name_as_null(self) -> StringPropertyBuilder<((),)> {
                    self.name(())
                }
            }

            impl<T0> StringPropertyBuilder<(T0,)> {
                /// Setter for the [`value` field](StringProperty#structfield.value).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value<T1>(self, value: T1) -> StringPropertyBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    let (v0,) = self.0;
                    StringPropertyBuilder((v0, value))
                }

                /// Sets the [`value` field](StringProperty#structfield.value) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn value_as_null(self) -> StringPropertyBuilder<(T0, ())> {
                    self.value(())
                }
            }

            impl<T0, T1> StringPropertyBuilder<(T0, T1)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [StringProperty].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<StringProperty>
                where
                    Self: ::planus::WriteAsOffset<StringProperty>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
            > ::planus::WriteAs<::planus::Offset<StringProperty>> for StringPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<StringProperty>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<StringProperty> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
            > ::planus::WriteAsOptional<::planus::Offset<StringProperty>>
                for StringPropertyBuilder<(T0, T1)>
            {
                type Prepared = ::planus::Offset<StringProperty>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<StringProperty>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
            > ::planus::WriteAsOffset<StringProperty> for StringPropertyBuilder<(T0, T1)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<StringProperty> {
                    let (v0, v1) = &self.0;
                    StringProperty::create(builder, v0, v1)
                }
            }

            /// Reference to a deserialized [StringProperty].
            #[derive(Copy, Clone)]
            pub struct StringPropertyRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> StringPropertyRef<'a> {
                /// Getter for the [`name` field](StringProperty#structfield.name).
                #[inline]
                pub fn name(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "StringProperty", "name")
                }

                /// Getter for the [`value` field](StringProperty#structfield.value).
                #[inline]
                pub fn value(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(1, "StringProperty", "value")
                }
            }

            impl<'a> ::core::fmt::Debug for StringPropertyRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("StringPropertyRef");
                    if let ::core::option::Option::Some(field_name) = self.name().transpose() {
                        f.field("name", &field_name);
                    }
                    if let ::core::option::Option::Some(field_value) = self.value().transpose() {
                        f.field("value", &field_value);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<StringPropertyRef<'a>> for StringProperty {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: StringPropertyRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        name: value.name()?.map(::core::convert::Into::into),
                        value: value.value()?.map(::core::convert::Into::into),
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for StringPropertyRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for StringPropertyRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[StringPropertyRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<StringProperty>> for StringProperty {
                type Value = ::planus::Offset<StringProperty>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<StringProperty>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for StringPropertyRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[StringPropertyRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `PropertyBag` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `PropertyBag` in the file `schema/checkpoint.fbs:53`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct PropertyBag {
                /// The field `ints` in the table `PropertyBag`
                pub ints: ::core::option::Option<::planus::alloc::vec::Vec<self::IntProperty>>,
                /// The field `floats` in the table `PropertyBag`
                pub floats: ::core::option::Option<::planus::alloc::vec::Vec<self::FloatProperty>>,
                /// The field `strings` in the table `PropertyBag`
                pub strings: ::core::option::Option<::planus::alloc::vec::Vec<self::StringProperty>>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for PropertyBag {
                fn default() -> Self {
                    Self {
                        ints: ::core::default::Default::default(),
                        floats: ::core::default::Default::default(),
                        strings: ::core::default::Default::default(),
                    }
                }
            }

            impl PropertyBag {
                /// Creates a [PropertyBagBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> PropertyBagBuilder<()> {
                    PropertyBagBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_ints: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::IntProperty>]>,
                    >,
                    field_floats: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::FloatProperty>]>,
                    >,
                    field_strings: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::StringProperty>]>,
                    >,
                ) -> ::planus::Offset<Self> {
                    let prepared_ints = field_ints.prepare(builder);
                    let prepared_floats = field_floats.prepare(builder);
                    let prepared_strings = field_strings.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<10> =
                        ::core::default::Default::default();
                    if prepared_ints.is_some() {
                        table_writer
                            .write_entry::<::planus::Offset<[::planus::Offset<self::IntProperty>]>>(0);
                    }
                    if prepared_floats.is_some() {
                        table_writer
                            .write_entry::<::planus::Offset<[::planus::Offset<self::FloatProperty>]>>(1);
                    }
                    if prepared_strings.is_some() {
                        table_writer
                            .write_entry::<::planus::Offset<[::planus::Offset<self::StringProperty>]>>(2);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_ints) = prepared_ints {
                                object_writer.write::<_, _, 4>(&prepared_ints);
                            }
                            if let ::core::option::Option::Some(prepared_floats) = prepared_floats {
                                object_writer.write::<_, _, 4>(&prepared_floats);
                            }
                            if let ::core::option::Option::Some(prepared_strings) = prepared_strings {
                                object_writer.write::<_, _, 4>(&prepared_strings);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<PropertyBag>> for PropertyBag {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<PropertyBag> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<PropertyBag>> for PropertyBag {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<PropertyBag>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<PropertyBag> for PropertyBag {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<PropertyBag> {
                    PropertyBag::create(builder, &self.ints, &self.floats, &self.strings)
                }
            }

            /// Builder for serializing an instance of the [PropertyBag] type.
            ///
            /// Can be created using the [PropertyBag::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct PropertyBagBuilder<State>(State);

            impl PropertyBagBuilder<()> {
                /// Setter for the [`ints` field](PropertyBag#structfield.ints).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn ints<T0>(self, value: T0) -> PropertyBagBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::IntProperty>]>>,
                {
                    PropertyBagBuilder((value,))
                }

                /// Sets the [`ints` field](PropertyBag#structfield.ints) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn ints_as_null(self) -> PropertyBagBuilder<((),)> {
                    self.ints(())
                }
            }

            impl<T0> PropertyBagBuilder<(T0,)> {
                /// Setter for the [`floats` field](PropertyBag#structfield.floats).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn floats<T1>(self, value: T1) -> PropertyBagBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::FloatProperty>]>>,
                {
                    let (v0,) = self.0;
                    PropertyBagBuilder((v0, value))
                }

                /// Sets the [`floats` field](PropertyBag#structfield.floats) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn floats_as_null(self) -> PropertyBagBuilder<(T0, ())> {
                    self.floats(())
                }
            }

            impl<T0, T1> PropertyBagBuilder<(T0, T1)> {
                /// Setter for the [`strings` field](PropertyBag#structfield.strings).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn strings<T2>(self, value: T2) -> PropertyBagBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::StringProperty>]>>,
                {
                    let (v0, v1) = self.0;
                    PropertyBagBuilder((v0, v1, value))
                }

                /// Sets the [`strings` field](PropertyBag#structfield.strings) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn strings_as_null(self) -> PropertyBagBuilder<(T0, T1, ())> {
                    self.strings(())
                }
            }

            impl<T0, T1, T2> PropertyBagBuilder<(T0, T1, T2)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [PropertyBag].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<PropertyBag>
                where
                    Self: ::planus::WriteAsOffset<PropertyBag>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::IntProperty>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::FloatProperty>]>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::StringProperty>]>>,
            > ::planus::WriteAs<::planus::Offset<PropertyBag>> for PropertyBagBuilder<(T0, T1, T2)>
            {
                type Prepared = ::planus::Offset<PropertyBag>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<PropertyBag> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::IntProperty>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::FloatProperty>]>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::StringProperty>]>>,
            > ::planus::WriteAsOptional<::planus::Offset<PropertyBag>> for PropertyBagBuilder<(T0, T1, T2)>
            {
                type Prepared = ::planus::Offset<PropertyBag>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<PropertyBag>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::IntProperty>]>>,
                T1: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::FloatProperty>]>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::StringProperty>]>>,
            > ::planus::WriteAsOffset<PropertyBag> for PropertyBagBuilder<(T0, T1, T2)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<PropertyBag> {
                    let (v0, v1, v2) = &self.0;
                    PropertyBag::create(builder, v0, v1, v2)
                }
            }

            /// Reference to a deserialized [PropertyBag].
            #[derive(Copy, Clone)]
            pub struct PropertyBagRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> PropertyBagRef<'a> {
                /// Getter for the [`ints` field](PropertyBag#structfield.ints).
                #[inline]
                pub fn ints(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<::planus::Vector<'a, ::planus::Result<self::IntPropertyRef<'a>>>>,
                > {
                    self.0.access(0, "PropertyBag", "ints")
                }

                /// Getter for the [`floats` field](PropertyBag#structfield.floats).
                #[inline]
                pub fn floats(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<
                        ::planus::Vector<'a, ::planus::Result<self::FloatPropertyRef<'a>>>,
                    >,
                > {
                    self.0.access(1, "PropertyBag", "floats")
                }

                /// Getter for the [`strings` field](PropertyBag#structfield.strings).
                #[inline]
                pub fn strings(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<
                        ::planus::Vector<'a, ::planus::Result<self::StringPropertyRef<'a>>>,
                    >,
                > {
                    self.0.access(2, "PropertyBag", "strings")
                }
            }

            impl<'a> ::core::fmt::Debug for PropertyBagRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("PropertyBagRef");
                    if let ::core::option::Option::Some(field_ints) = self.ints().transpose() {
                        f.field("ints", &field_ints);
                    }
                    if let ::core::option::Option::Some(field_floats) = self.floats().transpose() {
                        f.field("floats", &field_floats);
                    }
                    if let ::core::option::Option::Some(field_strings) = self.strings().transpose() {
                        f.field("strings", &field_strings);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<PropertyBagRef<'a>> for PropertyBag {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: PropertyBagRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        ints: if let ::core::option::Option::Some(ints) = value.ints()? {
                            ::core::option::Option::Some(ints.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        floats: if let ::core::option::Option::Some(floats) = value.floats()? {
                            ::core::option::Option::Some(floats.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        strings: if let ::core::option::Option::Some(strings) = value.strings()? {
                            ::core::option::Option::Some(strings.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for PropertyBagRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for PropertyBagRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[PropertyBagRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<PropertyBag>> for PropertyBag {
                type Value = ::planus::Offset<PropertyBag>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<PropertyBag>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for PropertyBagRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[PropertyBagRef]", "read_as_root", 0)
                    })
                }
            }

            /// The table `Scheduler` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `Scheduler` in the file `schema/checkpoint.fbs:61`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct Scheduler {
                /// The field `kind` in the table `Scheduler`
                pub kind: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `warmup_steps` in the table `Scheduler`
                pub warmup_steps: i64,
                /// The field `total_steps` in the table `Scheduler`
                pub total_steps: i64,
                /// The field `initial_learning_rate` in the table `Scheduler`
                pub initial_learning_rate: ::core::option::Option<f32>,
                /// The field `step` in the table `Scheduler`
                pub step: i64,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for Scheduler {
                fn default() -> Self {
                    Self {
                        kind: ::core::default::Default::default(),
                        warmup_steps: 0,
                        total_steps: 0,
                        initial_learning_rate: ::core::default::Default::default(),
                        step: 0,
                    }
                }
            }

            impl Scheduler {
                /// Creates a [SchedulerBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> SchedulerBuilder<()> {
                    SchedulerBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_kind: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_warmup_steps: impl ::planus::WriteAsDefault<i64, i64>,
                    field_total_steps: impl ::planus::WriteAsDefault<i64, i64>,
                    field_initial_learning_rate: impl ::planus::WriteAsOptional<f32>,
                    field_step: impl ::planus::WriteAsDefault<i64, i64>,
                ) -> ::planus::Offset<Self> {
                    let prepared_kind = field_kind.prepare(builder);
                    let prepared_warmup_steps = field_warmup_steps.prepare(builder, &0);
                    let prepared_total_steps = field_total_steps.prepare(builder, &0);
                    let prepared_initial_learning_rate = field_initial_learning_rate.prepare(builder);
                    let prepared_step = field_step.prepare(builder, &0);

                    let mut table_writer: ::planus::table_writer::TableWriter<14> =
                        ::core::default::Default::default();
                    if prepared_warmup_steps.is_some() {
                        table_writer.write_entry::<i64>(1);
                    }
                    if prepared_total_steps.is_some() {
                        table_writer.write_entry::<i64>(2);
                    }
                    if prepared_step.is_some() {
                        table_writer.write_entry::<i64>(4);
                    }
                    if prepared_kind.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(0);
                    }
                    if prepared_initial_learning_rate.is_some() {
                        table_writer.write_entry::<f32>(3);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_warmup_steps) = prepared_warmup_steps
                            {
                                object_writer.write::<_, _, 8>(&prepared_warmup_steps);
                            }
                            if let ::core::option::Option::Some(prepared_total_steps) = prepared_total_steps {
                                object_writer.write::<_, _, 8>(&prepared_total_steps);
                            }
                            if let ::core::option::Option::Some(prepared_step) = prepared_step {
                                object_writer.write::<_, _, 8>(&prepared_step);
                            }
                            if let ::core::option::Option::Some(prepared_kind) = prepared_kind {
                                object_writer.write::<_, _, 4>(&prepared_kind);
                            }
                            if let ::core::option::Option::Some(prepared_initial_learning_rate) =
                                prepared_initial_learning_rate
                            {
                                object_writer.write::<_, _, 4>(&prepared_initial_learning_rate);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<Scheduler>> for Scheduler {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Scheduler> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<Scheduler>> for Scheduler {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Scheduler>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<Scheduler> for Scheduler {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Scheduler> {
                    Scheduler::create(
                        builder,
                        &self.kind,
                        self.warmup_steps,
                        self.total_steps,
                        self.initial_learning_rate,
                        self.step,
                    )
                }
            }

            /// Builder for serializing an instance of the [Scheduler] type.
            ///
            /// Can be created using the [Scheduler::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct SchedulerBuilder<State>(State);

            impl SchedulerBuilder<()> {
                /// Setter for the [`kind` field](Scheduler#structfield.kind).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn kind<T0>(self, value: T0) -> SchedulerBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    SchedulerBuilder((value,))
                }

                /// Sets the [`kind` field](Scheduler#structfield.kind) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn kind_as_null(self) -> SchedulerBuilder<((),)> {
                    self.kind(())
                }
            }

            impl<T0> SchedulerBuilder<(T0,)> {
                /// Setter for the [`warmup_steps` field](Scheduler#structfield.warmup_steps).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn warmup_steps<T1>(self, value: T1) -> SchedulerBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0,) = self.0;
                    SchedulerBuilder((v0, value))
                }

                /// Sets the [`warmup_steps` field](Scheduler#structfield.warmup_steps) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn warmup_steps_as_default(self) -> SchedulerBuilder<(T0, ::planus::DefaultValue)> {
                    self.warmup_steps(::planus::DefaultValue)
                }
            }

            impl<T0, T1> SchedulerBuilder<(T0, T1)> {
                /// Setter for the [`total_steps` field](Scheduler#structfield.total_steps).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn total_steps<T2>(self, value: T2) -> SchedulerBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0, v1) = self.0;
                    SchedulerBuilder((v0, v1, value))
                }

                /// Sets the [`total_steps` field](Scheduler#structfield.total_steps) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn total_steps_as_default(self) -> SchedulerBuilder<(T0, T1, ::planus::DefaultValue)> {
                    self.total_steps(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2> SchedulerBuilder<(T0, T1, T2)> {
                /// Setter for the [`initial_learning_rate` field](Scheduler#structfield.initial_learning_rate).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn initial_learning_rate<T3>(self, value: T3) -> SchedulerBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsOptional<f32>,
                {
                    let (v0, v1, v2) = self.0;
                    SchedulerBuilder((v0, v1, v2, value))
                }

                /// Sets the [`initial_learning_rate` field](Scheduler#structfield.initial_learning_rate) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn initial_learning_rate_as_null(self) -> SchedulerBuilder<(T0, T1, T2, ())> {
                    self.initial_learning_rate(())
                }
            }

            impl<T0, T1, T2, T3> SchedulerBuilder<(T0, T1, T2, T3)> {
                /// Setter for the [`step` field](Scheduler#structfield.step).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn step<T4>(self, value: T4) -> SchedulerBuilder<(T0, T1, T2, T3, T4)>
                where
                    T4: ::planus::WriteAsDefault<i64, i64>,
                {
                    let (v0, v1, v2, v3) = self.0;
                    SchedulerBuilder((v0, v1, v2, v3, value))
                }

                /// Sets the [`step` field](Scheduler#structfield.step) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn step_as_default(self) -> SchedulerBuilder<(T0, T1, T2, T3, ::planus::DefaultValue)> {
                    self.step(::planus::DefaultValue)
                }
            }

            impl<T0, T1, T2, T3, T4> SchedulerBuilder<(T0, T1, T2, T3, T4)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [Scheduler].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<Scheduler>
                where
                    Self: ::planus::WriteAsOffset<Scheduler>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsDefault<i64, i64>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAs<::planus::Offset<Scheduler>> for SchedulerBuilder<(T0, T1, T2, T3, T4)>
            {
                type Prepared = ::planus::Offset<Scheduler>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Scheduler> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsDefault<i64, i64>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOptional<::planus::Offset<Scheduler>>
                for SchedulerBuilder<(T0, T1, T2, T3, T4)>
            {
                type Prepared = ::planus::Offset<Scheduler>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Scheduler>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T1: ::planus::WriteAsDefault<i64, i64>,
                T2: ::planus::WriteAsDefault<i64, i64>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsDefault<i64, i64>,
            > ::planus::WriteAsOffset<Scheduler> for SchedulerBuilder<(T0, T1, T2, T3, T4)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Scheduler> {
                    let (v0, v1, v2, v3, v4) = &self.0;
                    Scheduler::create(builder, v0, v1, v2, v3, v4)
                }
            }

            /// Reference to a deserialized [Scheduler].
            #[derive(Copy, Clone)]
            pub struct SchedulerRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> SchedulerRef<'a> {
                /// Getter for the [`kind` field](Scheduler#structfield.kind).
                #[inline]
                pub fn kind(&self) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(0, "Scheduler", "kind")
                }

                /// Getter for the [`warmup_steps` field](Scheduler#structfield.warmup_steps).
                #[inline]
                pub fn warmup_steps(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(self.0.access(1, "Scheduler", "warmup_steps")?.unwrap_or(0))
                }

                /// Getter for the [`total_steps` field](Scheduler#structfield.total_steps).
                #[inline]
                pub fn total_steps(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(self.0.access(2, "Scheduler", "total_steps")?.unwrap_or(0))
                }

                /// Getter for the [`initial_learning_rate` field](Scheduler#structfield.initial_learning_rate).
                #[inline]
                pub fn initial_learning_rate(&self) -> ::planus::Result<::core::option::Option<f32>> {
                    self.0.access(3, "Scheduler", "initial_learning_rate")
                }

                /// Getter for the [`step` field](Scheduler#structfield.step).
                #[inline]
                pub fn step(&self) -> ::planus::Result<i64> {
                    ::core::result::Result::Ok(self.0.access(4, "Scheduler", "step")?.unwrap_or(0))
                }
            }

            impl<'a> ::core::fmt::Debug for SchedulerRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("SchedulerRef");
                    if let ::core::option::Option::Some(field_kind) = self.kind().transpose() {
                        f.field("kind", &field_kind);
                    }
                    f.field("warmup_steps", &self.warmup_steps());
                    f.field("total_steps", &self.total_steps());
                    if let ::core::option::Option::Some(field_initial_learning_rate) =
                        self.initial_learning_rate().transpose()
                    {
                        f.field("initial_learning_rate", &field_initial_learning_rate);
                    }
                    f.field("step", &self.step());
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<SchedulerRef<'a>> for Scheduler {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: SchedulerRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        kind: value.kind()?.map(::core::convert::Into::into),
                        warmup_steps: ::core::convert::TryInto::try_into(value.warmup_steps()?)?,
                        total_steps: ::core::convert::TryInto::try_into(value.total_steps()?)?,
                        initial_learning_rate: if let ::core::option::Option::Some(initial_learning_rate) =
                            value.initial_learning_rate()?
                        {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(
                                initial_learning_rate,
                            )?)
                        } else {
                            ::core::option::Option::None
                        },
                        step: ::core::convert::TryInto::try_into(value.step()?)?,
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for SchedulerRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for SchedulerRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[SchedulerRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<Scheduler>> for Scheduler {
                type Value = ::planus::Offset<Scheduler>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<Scheduler>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for SchedulerRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| error_kind.with_error_location("[SchedulerRef]", "read_as_root", 0))
                }
            }

            /// The table `Extras` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `Extras` in the file `schema/checkpoint.fbs:69`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct Extras {
                /// The field `has_trailer` in the table `Extras`
                pub has_trailer: bool,
                /// The field `data_length` in the table `Extras`
                pub data_length: ::core::option::Option<u64>,
                /// The field `data_checksum` in the table `Extras`
                pub data_checksum: ::core::option::Option<u32>,
                /// The field `learning_rate` in the table `Extras`
                pub learning_rate: ::core::option::Option<f32>,
                /// The field `scheduler` in the table `Extras`
                pub scheduler: ::core::option::Option<::planus::alloc::boxed::Box<self::Scheduler>>,
                /// The field `seed` in the table `Extras`
                pub seed: ::core::option::Option<i64>,
                /// The field `train_step` in the table `Extras`
                pub train_step: ::core::option::Option<i64>,
                /// The field `optimizer` in the table `Extras`
                pub optimizer: ::core::option::Option<::planus::alloc::string::String>,
                /// The field `schedule_factor` in the table `Extras`
                pub schedule_factor: ::core::option::Option<f64>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for Extras {
                fn default() -> Self {
                    Self {
                        has_trailer: false,
                        data_length: ::core::default::Default::default(),
                        data_checksum: ::core::default::Default::default(),
                        learning_rate: ::core::default::Default::default(),
                        scheduler: ::core::default::Default::default(),
                        seed: ::core::default::Default::default(),
                        train_step: ::core::default::Default::default(),
                        optimizer: ::core::default::Default::default(),
                        schedule_factor: ::core::default::Default::default(),
                    }
                }
            }

            impl Extras {
                /// Creates a [ExtrasBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> ExtrasBuilder<()> {
                    ExtrasBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_has_trailer: impl ::planus::WriteAsDefault<bool, bool>,
                    field_data_length: impl ::planus::WriteAsOptional<u64>,
                    field_data_checksum: impl ::planus::WriteAsOptional<u32>,
                    field_learning_rate: impl ::planus::WriteAsOptional<f32>,
                    field_scheduler: impl ::planus::WriteAsOptional<::planus::Offset<self::Scheduler>>,
                    field_seed: impl ::planus::WriteAsOptional<i64>,
                    field_train_step: impl ::planus::WriteAsOptional<i64>,
                    field_optimizer: impl ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                    field_schedule_factor: impl ::planus::WriteAsOptional<f64>,
                ) -> ::planus::Offset<Self> {
                    let prepared_has_trailer = field_has_trailer.prepare(builder, &false);
                    let prepared_data_length = field_data_length.prepare(builder);
                    let prepared_data_checksum = field_data_checksum.prepare(builder);
                    let prepared_learning_rate = field_learning_rate.prepare(builder);
                    let prepared_scheduler = field_scheduler.prepare(builder);
                    let prepared_seed = field_seed.prepare(builder);
                    let prepared_train_step = field_train_step.prepare(builder);
                    let prepared_optimizer = field_optimizer.prepare(builder);
                    let prepared_schedule_factor = field_schedule_factor.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<22> =
                        ::core::default::Default::default();
                    if prepared_data_length.is_some() {
                        table_writer.write_entry::<u64>(1);
                    }
                    if prepared_seed.is_some() {
                        table_writer.write_entry::<i64>(5);
                    }
                    if prepared_train_step.is_some() {
                        table_writer.write_entry::<i64>(6);
                    }
                    if prepared_schedule_factor.is_some() {
                        table_writer.write_entry::<f64>(8);
                    }
                    if prepared_data_checksum.is_some() {
                        table_writer.write_entry::<u32>(2);
                    }
                    if prepared_learning_rate.is_some() {
                        table_writer.write_entry::<f32>(3);
                    }
                    if prepared_scheduler.is_some() {
                        table_writer.write_entry::<::planus::Offset<self::Scheduler>>(4);
                    }
                    if prepared_optimizer.is_some() {
                        table_writer.write_entry::<::planus::Offset<str>>(7);
                    }
                    if prepared_has_trailer.is_some() {
                        table_writer.write_entry::<bool>(0);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_data_length) = prepared_data_length {
                                object_writer.write::<_, _, 8>(&prepared_data_length);
                            }
                            if let ::core::option::Option::Some(prepared_seed) = prepared_seed {
                                object_writer.write::<_, _, 8>(&prepared_seed);
                            }
                            if let ::core::option::Option::Some(prepared_train_step) = prepared_train_step {
                                object_writer.write::<_, _, 8>(&prepared_train_step);
                            }
                            if let ::core::option::Option::Some(prepared_schedule_factor) =
                                prepared_schedule_factor
                            {
                                object_writer.write::<_, _, 8>(&prepared_schedule_factor);
                            }
                            if let ::core::option::Option::Some(prepared_data_checksum) =
                                prepared_data_checksum
                            {
                                object_writer.write::<_, _, 4>(&prepared_data_checksum);
                            }
                            if let ::core::option::Option::Some(prepared_learning_rate) =
                                prepared_learning_rate
                            {
                                object_writer.write::<_, _, 4>(&prepared_learning_rate);
                            }
                            if let ::core::option::Option::Some(prepared_scheduler) = prepared_scheduler {
                                object_writer.write::<_, _, 4>(&prepared_scheduler);
                            }
                            if let ::core::option::Option::Some(prepared_optimizer) = prepared_optimizer {
                                object_writer.write::<_, _, 4>(&prepared_optimizer);
                            }
                            if let ::core::option::Option::Some(prepared_has_trailer) = prepared_has_trailer {
                                object_writer.write::<_, _, 1>(&prepared_has_trailer);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<Extras>> for Extras {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Extras> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<Extras>> for Extras {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Extras>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<Extras> for Extras {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Extras> {
                    Extras::create(
                        builder,
                        self.has_trailer,
                        self.data_length,
                        self.data_checksum,
                        self.learning_rate,
                        &self.scheduler,
                        self.seed,
                        self.train_step,
                        &self.optimizer,
                        self.schedule_factor,
                    )
                }
            }

            /// Builder for serializing an instance of the [Extras] type.
            ///
            /// Can be created using the [Extras::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct ExtrasBuilder<State>(State);

            impl ExtrasBuilder<()> {
                /// Setter for the [`has_trailer` field](Extras#structfield.has_trailer).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn has_trailer<T0>(self, value: T0) -> ExtrasBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsDefault<bool, bool>,
                {
                    ExtrasBuilder((value,))
                }

                /// Sets the [`has_trailer` field](Extras#structfield.has_trailer) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn has_trailer_as_default(self) -> ExtrasBuilder<(::planus::DefaultValue,)> {
                    self.has_trailer(::planus::DefaultValue)
                }
            }

            impl<T0> ExtrasBuilder<(T0,)> {
                /// Setter for the [`data_length` field](Extras#structfield.data_length).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_length<T1>(self, value: T1) -> ExtrasBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<u64>,
                {
                    let (v0,) = self.0;
                    ExtrasBuilder((v0, value))
                }

                /// Sets the [`data_length` field](Extras#structfield.data_length) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_length_as_null(self) -> ExtrasBuilder<(T0, ())> {
                    self.data_length(())
                }
            }

            impl<T0, T1> ExtrasBuilder<(T0, T1)> {
                /// Setter for the [`data_checksum` field](Extras#structfield.data_checksum).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_checksum<T2>(self, value: T2) -> ExtrasBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsOptional<u32>,
                {
                    let (v0, v1) = self.0;
                    ExtrasBuilder((v0, v1, value))
                }

                /// Sets the [`data_checksum` field](Extras#structfield.data_checksum) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn data_checksum_as_null(self) -> ExtrasBuilder<(T0, T1, ())> {
                    self.data_checksum(())
                }
            }

            impl<T0, T1, T2> ExtrasBuilder<(T0, T1, T2)> {
                /// Setter for the [`learning_rate` field](Extras#structfield.learning_rate).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn learning_rate<T3>(self, value: T3) -> ExtrasBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsOptional<f32>,
                {
                    let (v0, v1, v2) = self.0;
                    ExtrasBuilder((v0, v1, v2, value))
                }

                /// Sets the [`learning_rate` field](Extras#structfield.learning_rate) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn learning_rate_as_null(self) -> ExtrasBuilder<(T0, T1, T2, ())> {
                    self.learning_rate(())
                }
            }

            impl<T0, T1, T2, T3> ExtrasBuilder<(T0, T1, T2, T3)> {
                /// Setter for the [`scheduler` field](Extras#structfield.scheduler).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn scheduler<T4>(self, value: T4) -> ExtrasBuilder<(T0, T1, T2, T3, T4)>
                where
                    T4: ::planus::WriteAsOptional<::planus::Offset<self::Scheduler>>,
                {
                    let (v0, v1, v2, v3) = self.0;
                    ExtrasBuilder((v0, v1, v2, v3, value))
                }

                /// Sets the [`scheduler` field](Extras#structfield.scheduler) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn scheduler_as_null(self) -> ExtrasBuilder<(T0, T1, T2, T3, ())> {
                    self.scheduler(())
                }
            }

            impl<T0, T1, T2, T3, T4> ExtrasBuilder<(T0, T1, T2, T3, T4)> {
                /// Setter for the [`seed` field](Extras#structfield.seed).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn seed<T5>(self, value: T5) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5)>
                where
                    T5: ::planus::WriteAsOptional<i64>,
                {
                    let (v0, v1, v2, v3, v4) = self.0;
                    ExtrasBuilder((v0, v1, v2, v3, v4, value))
                }

                /// Sets the [`seed` field](Extras#structfield.seed) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn seed_as_null(self) -> ExtrasBuilder<(T0, T1, T2, T3, T4, ())> {
                    self.seed(())
                }
            }

            impl<T0, T1, T2, T3, T4, T5> ExtrasBuilder<(T0, T1, T2, T3, T4, T5)> {
                /// Setter for the [`train_step` field](Extras#structfield.train_step).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn train_step<T6>(self, value: T6) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6)>
                where
                    T6: ::planus::WriteAsOptional<i64>,
                {
                    let (v0, v1, v2, v3, v4, v5) = self.0;
                    ExtrasBuilder((v0, v1, v2, v3, v4, v5, value))
                }

                /// Sets the [`train_step` field](Extras#structfield.train_step) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn train_step_as_null(self) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, ())> {
                    self.train_step(())
                }
            }

            impl<T0, T1, T2, T3, T4, T5, T6> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6)> {
                /// Setter for the [`optimizer` field](Extras#structfield.optimizer).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer<T7>(self, value: T7) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7)>
                where
                    T7: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                {
                    let (v0, v1, v2, v3, v4, v5, v6) = self.0;
                    ExtrasBuilder((v0, v1, v2, v3, v4, v5, v6, value))
                }

                /// Sets the [`optimizer` field](Extras#structfield.optimizer) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer_as_null(self) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, ())> {
                    self.optimizer(())
                }
            }

            impl<T0, T1, T2, T3, T4, T5, T6, T7> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7)> {
                /// Setter for the [`schedule_factor` field](Extras#structfield.schedule_factor).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn schedule_factor<T8>(
                    self,
                    value: T8,
                ) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, T8)>
                where
                    T8: ::planus::WriteAsOptional<f64>,
                {
                    let (v0, v1, v2, v3, v4, v5, v6, v7) = self.0;
                    ExtrasBuilder((v0, v1, v2, v3, v4, v5, v6, v7, value))
                }

                /// Sets the [`schedule_factor` field](Extras#structfield.schedule_factor) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn schedule_factor_as_null(self) -> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, ())> {
                    self.schedule_factor(())
                }
            }

            impl<T0, T1, T2, T3, T4, T5, T6, T7, T8> ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, T8)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [Extras].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<Extras>
                where
                    Self: ::planus::WriteAsOffset<Extras>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<bool, bool>,
                T1: ::planus::WriteAsOptional<u64>,
                T2: ::planus::WriteAsOptional<u32>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Scheduler>>,
                T5: ::planus::WriteAsOptional<i64>,
                T6: ::planus::WriteAsOptional<i64>,
                T7: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T8: ::planus::WriteAsOptional<f64>,
            > ::planus::WriteAs<::planus::Offset<Extras>>
                for ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, T8)>
            {
                type Prepared = ::planus::Offset<Extras>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Extras> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<bool, bool>,
                T1: ::planus::WriteAsOptional<u64>,
                T2: ::planus::WriteAsOptional<u32>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Scheduler>>,
                T5: ::planus::WriteAsOptional<i64>,
                T6: ::planus::WriteAsOptional<i64>,
                T7: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T8: ::planus::WriteAsOptional<f64>,
            > ::planus::WriteAsOptional<::planus::Offset<Extras>>
                for ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, T8)>
            {
                type Prepared = ::planus::Offset<Extras>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Extras>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<bool, bool>,
                T1: ::planus::WriteAsOptional<u64>,
                T2: ::planus::WriteAsOptional<u32>,
                T3: ::planus::WriteAsOptional<f32>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Scheduler>>,
                T5: ::planus::WriteAsOptional<i64>,
                T6: ::planus::WriteAsOptional<i64>,
                T7: ::planus::WriteAsOptional<::planus::Offset<::core::primitive::str>>,
                T8: ::planus::WriteAsOptional<f64>,
            > ::planus::WriteAsOffset<Extras> for ExtrasBuilder<(T0, T1, T2, T3, T4, T5, T6, T7, T8)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Extras> {
                    let (v0, v1, v2, v3, v4, v5, v6, v7, v8) = &self.0;
                    Extras::create(builder, v0, v1, v2, v3, v4, v5, v6, v7, v8)
                }
            }

            /// Reference to a deserialized [Extras].
            #[derive(Copy, Clone)]
            pub struct ExtrasRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> ExtrasRef<'a> {
                /// Getter for the [`has_trailer` field](Extras#structfield.has_trailer).
                #[inline]
                pub fn has_trailer(&self) -> ::planus::Result<bool> {
                    ::core::result::Result::Ok(self.0.access(0, "Extras", "has_trailer")?.unwrap_or(false))
                }

                /// Getter for the [`data_length` field](Extras#structfield.data_length).
                #[inline]
                pub fn data_length(&self) -> ::planus::Result<::core::option::Option<u64>> {
                    self.0.access(1, "Extras", "data_length")
                }

                /// Getter for the [`data_checksum` field](Extras#structfield.data_checksum).
                #[inline]
                pub fn data_checksum(&self) -> ::planus::Result<::core::option::Option<u32>> {
                    self.0.access(2, "Extras", "data_checksum")
                }

                /// Getter for the [`learning_rate` field](Extras#structfield.learning_rate).
                #[inline]
                pub fn learning_rate(&self) -> ::planus::Result<::core::option::Option<f32>> {
                    self.0.access(3, "Extras", "learning_rate")
                }

                /// Getter for the [`scheduler` field](Extras#structfield.scheduler).
                #[inline]
                pub fn scheduler(&self) -> ::planus::Result<::core::option::Option<self::SchedulerRef<'a>>> {
                    self.0.access(4, "Extras", "scheduler")
                }

                /// Getter for the [`seed` field](Extras#structfield.seed).
                #[inline]
                pub fn seed(&self) -> ::planus::Result<::core::option::Option<i64>> {
                    self.0.access(5, "Extras", "seed")
                }

                /// Getter for the [`train_step` field](Extras#structfield.train_step).
                #[inline]
                pub fn train_step(&self) -> ::planus::Result<::core::option::Option<i64>> {
                    self.0.access(6, "Extras", "train_step")
                }

                /// Getter for the [`optimizer` field](Extras#structfield.optimizer).
                #[inline]
                pub fn optimizer(
                    &self,
                ) -> ::planus::Result<::core::option::Option<&'a ::core::primitive::str>> {
                    self.0.access(7, "Extras", "optimizer")
                }

                /// Getter for the [`schedule_factor` field](Extras#structfield.schedule_factor).
                #[inline]
                pub fn schedule_factor(&self) -> ::planus::Result<::core::option::Option<f64>> {
                    self.0.access(8, "Extras", "schedule_factor")
                }
            }

            impl<'a> ::core::fmt::Debug for ExtrasRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("ExtrasRef");
                    f.field("has_trailer", &self.has_trailer());
                    if let ::core::option::Option::Some(field_data_length) = self.data_length().transpose() {
                        f.field("data_length", &field_data_length);
                    }
                    if let ::core::option::Option::Some(field_data_checksum) =
                        self.data_checksum().transpose()
                    {
                        f.field("data_checksum", &field_data_checksum);
                    }
                    if let ::core::option::Option::Some(field_learning_rate) =
                        self.learning_rate().transpose()
                    {
                        f.field("learning_rate", &field_learning_rate);
                    }
                    if let ::core::option::Option::Some(field_scheduler) = self.scheduler().transpose() {
                        f.field("scheduler", &field_scheduler);
                    }
                    if let ::core::option::Option::Some(field_seed) = self.seed().transpose() {
                        f.field("seed", &field_seed);
                    }
                    if let ::core::option::Option::Some(field_train_step) = self.train_step().transpose() {
                        f.field("train_step", &field_train_step);
                    }
                    if let ::core::option::Option::Some(field_optimizer) = self.optimizer().transpose() {
                        f.field("optimizer", &field_optimizer);
                    }
                    if let ::core::option::Option::Some(field_schedule_factor) =
                        self.schedule_factor().transpose()
                    {
                        f.field("schedule_factor", &field_schedule_factor);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<ExtrasRef<'a>> for Extras {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: ExtrasRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        has_trailer: ::core::convert::TryInto::try_into(value.has_trailer()?)?,
                        data_length: if let ::core::option::Option::Some(data_length) = value.data_length()? {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(data_length)?)
                        } else {
                            ::core::option::Option::None
                        },
                        data_checksum: if let ::core::option::Option::Some(data_checksum) =
                            value.data_checksum()?
                        {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(data_checksum)?)
                        } else {
                            ::core::option::Option::None
                        },
                        learning_rate: if let ::core::option::Option::Some(learning_rate) =
                            value.learning_rate()?
                        {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(learning_rate)?)
                        } else {
                            ::core::option::Option::None
                        },
                        scheduler: if let ::core::option::Option::Some(scheduler) = value.scheduler()? {
                            ::core::option::Option::Some(::planus::alloc::boxed::Box::new(
                                ::core::convert::TryInto::try_into(scheduler)?,
                            ))
                        } else {
                            ::core::option::Option::None
                        },
                        seed: if let ::core::option::Option::Some(seed) = value.seed()? {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(seed)?)
                        } else {
                            ::core::option::Option::None
                        },
                        train_step: if let ::core::option::Option::Some(train_step) = value.train_step()? {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(train_step)?)
                        } else {
                            ::core::option::Option::None
                        },
                        optimizer: value.optimizer()?.map(::core::convert::Into::into),
                        schedule_factor: if let ::core::option::Option::Some(schedule_factor) =
                            value.schedule_factor()?
                        {
                            ::core::option::Option::Some(::core::convert::TryInto::try_into(schedule_factor)?)
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for ExtrasRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for ExtrasRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[ExtrasRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<Extras>> for Extras {
                type Value = ::planus::Offset<Extras>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<Extras>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for ExtrasRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| error_kind.with_error_location("[ExtrasRef]", "read_as_root", 0))
                }
            }

            /// The table `Checkpoint` in the namespace `ortrain.checkpoint`
            ///
            /// Generated from these locations:
            /// * Table `Checkpoint` in the file `schema/checkpoint.fbs:81`
            #[derive(Clone, Debug, PartialEq, PartialOrd)]
            pub struct Checkpoint {
                /// The field `version` in the table `Checkpoint`
                pub version: i32,
                /// The field `module_state` in the table `Checkpoint`
                pub module_state: ::core::option::Option<::planus::alloc::boxed::Box<self::ModuleState>>,
                /// The field `optimizer_groups` in the table `Checkpoint`
                pub optimizer_groups: ::core::option::Option<::planus::alloc::vec::Vec<self::OptimizerGroup>>,
                /// The field `property_bag` in the table `Checkpoint`
                pub property_bag: ::core::option::Option<::planus::alloc::boxed::Box<self::PropertyBag>>,
                /// The field `extras` in the table `Checkpoint`
                pub extras: ::core::option::Option<::planus::alloc::boxed::Box<self::Extras>>,
            }

            #[allow(clippy::derivable_impls)]
            impl ::core::default::Default for Checkpoint {
                fn default() -> Self {
                    Self {
                        version: 0,
                        module_state: ::core::default::Default::default(),
                        optimizer_groups: ::core::default::Default::default(),
                        property_bag: ::core::default::Default::default(),
                        extras: ::core::default::Default::default(),
                    }
                }
            }

            impl Checkpoint {
                /// Creates a [CheckpointBuilder] for serializing an instance of this table.
                #[inline]
                pub fn builder() -> CheckpointBuilder<()> {
                    CheckpointBuilder(())
                }

                #[allow(clippy::too_many_arguments)]
                pub fn create(
                    builder: &mut ::planus::Builder,
                    field_version: impl ::planus::WriteAsDefault<i32, i32>,
                    field_module_state: impl ::planus::WriteAsOptional<::planus::Offset<self::ModuleState>>,
                    field_optimizer_groups: impl ::planus::WriteAsOptional<
                        ::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>,
                    >,
                    field_property_bag: impl ::planus::WriteAsOptional<::planus::Offset<self::PropertyBag>>,
                    field_extras: impl ::planus::WriteAsOptional<::planus::Offset<self::Extras>>,
                ) -> ::planus::Offset<Self> {
                    let prepared_version = field_version.prepare(builder, &0);
                    let prepared_module_state = field_module_state.prepare(builder);
                    let prepared_optimizer_groups = field_optimizer_groups.prepare(builder);
                    let prepared_property_bag = field_property_bag.prepare(builder);
                    let prepared_extras = field_extras.prepare(builder);

                    let mut table_writer: ::planus::table_writer::TableWriter<14> =
                        ::core::default::Default::default();
                    if prepared_version.is_some() {
                        table_writer.write_entry::<i32>(0);
                    }
                    if prepared_module_state.is_some() {
                        table_writer.write_entry::<::planus::Offset<self::ModuleState>>(1);
                    }
                    if prepared_optimizer_groups.is_some() {
                        table_writer
                            .write_entry::<::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>>(2);
                    }
                    if prepared_property_bag.is_some() {
                        table_writer.write_entry::<::planus::Offset<self::PropertyBag>>(3);
                    }
                    if prepared_extras.is_some() {
                        table_writer.write_entry::<::planus::Offset<self::Extras>>(4);
                    }

                    unsafe {
                        table_writer.finish(builder, |object_writer| {
                            if let ::core::option::Option::Some(prepared_version) = prepared_version {
                                object_writer.write::<_, _, 4>(&prepared_version);
                            }
                            if let ::core::option::Option::Some(prepared_module_state) = prepared_module_state
                            {
                                object_writer.write::<_, _, 4>(&prepared_module_state);
                            }
                            if let ::core::option::Option::Some(prepared_optimizer_groups) =
                                prepared_optimizer_groups
                            {
                                object_writer.write::<_, _, 4>(&prepared_optimizer_groups);
                            }
                            if let ::core::option::Option::Some(prepared_property_bag) = prepared_property_bag
                            {
                                object_writer.write::<_, _, 4>(&prepared_property_bag);
                            }
                            if let ::core::option::Option::Some(prepared_extras) = prepared_extras {
                                object_writer.write::<_, _, 4>(&prepared_extras);
                            }
                        });
                    }
                    builder.current_offset()
                }
            }

            impl ::planus::WriteAs<::planus::Offset<Checkpoint>> for Checkpoint {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Checkpoint> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl ::planus::WriteAsOptional<::planus::Offset<Checkpoint>> for Checkpoint {
                type Prepared = ::planus::Offset<Self>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Checkpoint>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl ::planus::WriteAsOffset<Checkpoint> for Checkpoint {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Checkpoint> {
                    Checkpoint::create(
                        builder,
                        self.version,
                        &self.module_state,
                        &self.optimizer_groups,
                        &self.property_bag,
                        &self.extras,
                    )
                }
            }

            /// Builder for serializing an instance of the [Checkpoint] type.
            ///
            /// Can be created using the [Checkpoint::builder] method.
            #[derive(Debug)]
            #[must_use]
            pub struct CheckpointBuilder<State>(State);

            impl CheckpointBuilder<()> {
                /// Setter for the [`version` field](Checkpoint#structfield.version).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn version<T0>(self, value: T0) -> CheckpointBuilder<(T0,)>
                where
                    T0: ::planus::WriteAsDefault<i32, i32>,
                {
                    CheckpointBuilder((value,))
                }

                /// Sets the [`version` field](Checkpoint#structfield.version) to the default value.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn version_as_default(self) -> CheckpointBuilder<(::planus::DefaultValue,)> {
                    self.version(::planus::DefaultValue)
                }
            }

            impl<T0> CheckpointBuilder<(T0,)> {
                /// Setter for the [`module_state` field](Checkpoint#structfield.module_state).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn module_state<T1>(self, value: T1) -> CheckpointBuilder<(T0, T1)>
                where
                    T1: ::planus::WriteAsOptional<::planus::Offset<self::ModuleState>>,
                {
                    let (v0,) = self.0;
                    CheckpointBuilder((v0, value))
                }

                /// Sets the [`module_state` field](Checkpoint#structfield.module_state) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn module_state_as_null(self) -> CheckpointBuilder<(T0, ())> {
                    self.module_state(())
                }
            }

            impl<T0, T1> CheckpointBuilder<(T0, T1)> {
                /// Setter for the [`optimizer_groups` field](Checkpoint#structfield.optimizer_groups).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer_groups<T2>(self, value: T2) -> CheckpointBuilder<(T0, T1, T2)>
                where
                    T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>>,
                {
                    let (v0, v1) = self.0;
                    CheckpointBuilder((v0, v1, value))
                }

                /// Sets the [`optimizer_groups` field](Checkpoint#structfield.optimizer_groups) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn optimizer_groups_as_null(self) -> CheckpointBuilder<(T0, T1, ())> {
                    self.optimizer_groups(())
                }
            }

            impl<T0, T1, T2> CheckpointBuilder<(T0, T1, T2)> {
                /// Setter for the [`property_bag` field](Checkpoint#structfield.property_bag).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn property_bag<T3>(self, value: T3) -> CheckpointBuilder<(T0, T1, T2, T3)>
                where
                    T3: ::planus::WriteAsOptional<::planus::Offset<self::PropertyBag>>,
                {
                    let (v0, v1, v2) = self.0;
                    CheckpointBuilder((v0, v1, v2, value))
                }

                /// Sets the [`property_bag` field](Checkpoint#structfield.property_bag) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn property_bag_as_null(self) -> CheckpointBuilder<(T0, T1, T2, ())> {
                    self.property_bag(())
                }
            }

            impl<T0, T1, T2, T3> CheckpointBuilder<(T0, T1, T2, T3)> {
                /// Setter for the [`extras` field](Checkpoint#structfield.extras).
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn extras<T4>(self, value: T4) -> CheckpointBuilder<(T0, T1, T2, T3, T4)>
                where
                    T4: ::planus::WriteAsOptional<::planus::Offset<self::Extras>>,
                {
                    let (v0, v1, v2, v3) = self.0;
                    CheckpointBuilder((v0, v1, v2, v3, value))
                }

                /// Sets the [`extras` field](Checkpoint#structfield.extras) to null.
                #[inline]
                #[allow(clippy::type_complexity)]
                pub fn extras_as_null(self) -> CheckpointBuilder<(T0, T1, T2, T3, ())> {
                    self.extras(())
                }
            }

            impl<T0, T1, T2, T3, T4> CheckpointBuilder<(T0, T1, T2, T3, T4)> {
                /// Finish writing the builder to get an [Offset](::planus::Offset) to a serialized [Checkpoint].
                #[inline]
                pub fn finish(self, builder: &mut ::planus::Builder) -> ::planus::Offset<Checkpoint>
                where
                    Self: ::planus::WriteAsOffset<Checkpoint>,
                {
                    ::planus::WriteAsOffset::prepare(&self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<i32, i32>,
                T1: ::planus::WriteAsOptional<::planus::Offset<self::ModuleState>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>>,
                T3: ::planus::WriteAsOptional<::planus::Offset<self::PropertyBag>>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Extras>>,
            > ::planus::WriteAs<::planus::Offset<Checkpoint>> for CheckpointBuilder<(T0, T1, T2, T3, T4)>
            {
                type Prepared = ::planus::Offset<Checkpoint>;

                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Checkpoint> {
                    ::planus::WriteAsOffset::prepare(self, builder)
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<i32, i32>,
                T1: ::planus::WriteAsOptional<::planus::Offset<self::ModuleState>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>>,
                T3: ::planus::WriteAsOptional<::planus::Offset<self::PropertyBag>>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Extras>>,
            > ::planus::WriteAsOptional<::planus::Offset<Checkpoint>>
                for CheckpointBuilder<(T0, T1, T2, T3, T4)>
            {
                type Prepared = ::planus::Offset<Checkpoint>;

                #[inline]
                fn prepare(
                    &self,
                    builder: &mut ::planus::Builder,
                ) -> ::core::option::Option<::planus::Offset<Checkpoint>> {
                    ::core::option::Option::Some(::planus::WriteAsOffset::prepare(self, builder))
                }
            }

            impl<
                T0: ::planus::WriteAsDefault<i32, i32>,
                T1: ::planus::WriteAsOptional<::planus::Offset<self::ModuleState>>,
                T2: ::planus::WriteAsOptional<::planus::Offset<[::planus::Offset<self::OptimizerGroup>]>>,
                T3: ::planus::WriteAsOptional<::planus::Offset<self::PropertyBag>>,
                T4: ::planus::WriteAsOptional<::planus::Offset<self::Extras>>,
            > ::planus::WriteAsOffset<Checkpoint> for CheckpointBuilder<(T0, T1, T2, T3, T4)>
            {
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> ::planus::Offset<Checkpoint> {
                    let (v0, v1, v2, v3, v4) = &self.0;
                    Checkpoint::create(builder, v0, v1, v2, v3, v4)
                }
            }

            /// Reference to a deserialized [Checkpoint].
            #[derive(Copy, Clone)]
            pub struct CheckpointRef<'a>(#[allow(dead_code)] ::planus::table_reader::Table<'a>);

            impl<'a> CheckpointRef<'a> {
                /// Getter for the [`version` field](Checkpoint#structfield.version).
                #[inline]
                pub fn version(&self) -> ::planus::Result<i32> {
                    ::core::result::Result::Ok(self.0.access(0, "Checkpoint", "version")?.unwrap_or(0))
                }

                /// Getter for the [`module_state` field](Checkpoint#structfield.module_state).
                #[inline]
                pub fn module_state(
                    &self,
                ) -> ::planus::Result<::core::option::Option<self::ModuleStateRef<'a>>> {
                    self.0.access(1, "Checkpoint", "module_state")
                }

                /// Getter for the [`optimizer_groups` field](Checkpoint#structfield.optimizer_groups).
                #[inline]
                pub fn optimizer_groups(
                    &self,
                ) -> ::planus::Result<
                    ::core::option::Option<
                        ::planus::Vector<'a, ::planus::Result<self::OptimizerGroupRef<'a>>>,
                    >,
                > {
                    self.0.access(2, "Checkpoint", "optimizer_groups")
                }

                /// Getter for the [`property_bag` field](Checkpoint#structfield.property_bag).
                #[inline]
                pub fn property_bag(
                    &self,
                ) -> ::planus::Result<::core::option::Option<self::PropertyBagRef<'a>>> {
                    self.0.access(3, "Checkpoint", "property_bag")
                }

                /// Getter for the [`extras` field](Checkpoint#structfield.extras).
                #[inline]
                pub fn extras(&self) -> ::planus::Result<::core::option::Option<self::ExtrasRef<'a>>> {
                    self.0.access(4, "Checkpoint", "extras")
                }
            }

            impl<'a> ::core::fmt::Debug for CheckpointRef<'a> {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    let mut f = f.debug_struct("CheckpointRef");
                    f.field("version", &self.version());
                    if let ::core::option::Option::Some(field_module_state) = self.module_state().transpose()
                    {
                        f.field("module_state", &field_module_state);
                    }
                    if let ::core::option::Option::Some(field_optimizer_groups) =
                        self.optimizer_groups().transpose()
                    {
                        f.field("optimizer_groups", &field_optimizer_groups);
                    }
                    if let ::core::option::Option::Some(field_property_bag) = self.property_bag().transpose()
                    {
                        f.field("property_bag", &field_property_bag);
                    }
                    if let ::core::option::Option::Some(field_extras) = self.extras().transpose() {
                        f.field("extras", &field_extras);
                    }
                    f.finish()
                }
            }

            impl<'a> ::core::convert::TryFrom<CheckpointRef<'a>> for Checkpoint {
                type Error = ::planus::Error;

                #[allow(unreachable_code)]
                fn try_from(value: CheckpointRef<'a>) -> ::planus::Result<Self> {
                    ::core::result::Result::Ok(Self {
                        version: ::core::convert::TryInto::try_into(value.version()?)?,
                        module_state: if let ::core::option::Option::Some(module_state) =
                            value.module_state()?
                        {
                            ::core::option::Option::Some(::planus::alloc::boxed::Box::new(
                                ::core::convert::TryInto::try_into(module_state)?,
                            ))
                        } else {
                            ::core::option::Option::None
                        },
                        optimizer_groups: if let ::core::option::Option::Some(optimizer_groups) =
                            value.optimizer_groups()?
                        {
                            ::core::option::Option::Some(optimizer_groups.to_vec_result()?)
                        } else {
                            ::core::option::Option::None
                        },
                        property_bag: if let ::core::option::Option::Some(property_bag) =
                            value.property_bag()?
                        {
                            ::core::option::Option::Some(::planus::alloc::boxed::Box::new(
                                ::core::convert::TryInto::try_into(property_bag)?,
                            ))
                        } else {
                            ::core::option::Option::None
                        },
                        extras: if let ::core::option::Option::Some(extras) = value.extras()? {
                            ::core::option::Option::Some(::planus::alloc::boxed::Box::new(
                                ::core::convert::TryInto::try_into(extras)?,
                            ))
                        } else {
                            ::core::option::Option::None
                        },
                    })
                }
            }

            impl<'a> ::planus::TableRead<'a> for CheckpointRef<'a> {
                #[inline]
                fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::core::result::Result<Self, ::planus::errors::ErrorKind> {
                    ::core::result::Result::Ok(Self(::planus::table_reader::Table::from_buffer(
                        buffer, offset,
                    )?))
                }
            }

            impl<'a> ::planus::VectorReadInner<'a> for CheckpointRef<'a> {
                type Error = ::planus::Error;
                const STRIDE: usize = 4;

                unsafe fn from_buffer(
                    buffer: ::planus::SliceWithStartOffset<'a>,
                    offset: usize,
                ) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(buffer, offset).map_err(|error_kind| {
                        error_kind.with_error_location("[CheckpointRef]", "get", buffer.offset_from_start)
                    })
                }
            }

            /// # Safety
            /// The planus compiler generates implementations that initialize
            /// the bytes in `write_values`.
            unsafe impl ::planus::VectorWrite<::planus::Offset<Checkpoint>> for Checkpoint {
                type Value = ::planus::Offset<Checkpoint>;
                const STRIDE: usize = 4;
                #[inline]
                fn prepare(&self, builder: &mut ::planus::Builder) -> Self::Value {
                    ::planus::WriteAs::prepare(self, builder)
                }

                #[inline]
                unsafe fn write_values(
                    values: &[::planus::Offset<Checkpoint>],
                    bytes: *mut ::core::mem::MaybeUninit<u8>,
                    buffer_position: u32,
                ) {
                    let bytes = bytes as *mut [::core::mem::MaybeUninit<u8>; 4];
                    for (i, v) in ::core::iter::Iterator::enumerate(values.iter()) {
                        ::planus::WriteAsPrimitive::write(
                            v,
                            ::planus::Cursor::new(unsafe { &mut *bytes.add(i) }),
                            buffer_position - (Self::STRIDE * i) as u32,
                        );
                    }
                }
            }

            impl<'a> ::planus::ReadAsRoot<'a> for CheckpointRef<'a> {
                fn read_as_root(slice: &'a [u8]) -> ::planus::Result<Self> {
                    ::planus::TableRead::from_buffer(
                        ::planus::SliceWithStartOffset { buffer: slice, offset_from_start: 0 },
                        0,
                    )
                    .map_err(|error_kind| {
                        error_kind.with_error_location("[CheckpointRef]", "read_as_root", 0)
                    })
                }
            }
        }
    }
}
