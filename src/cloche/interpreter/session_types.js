// TypeScript as JavaScript: types are replaced by spaces, so that lines and columns stay, and enums are written out. It
// is appended to session.js.
//
// Theory of operation: a parser of the language's grammar without its meaning. It reads the code once, goes back where a
// bracket turns out to be another one (`tried`), and notes what to replace. It refuses nothing: what it does not
// understand stays as it is, and V8 says what is wrong. Namespaces with code in them, and `import x = require()` of
// types alone, are not understood.

const WORD = /#?[\w$\u0080-\uffff\\]+/y;
const BLANK = /(?:\s+|\/\/.*|\/\*[^]*?\*\/)*/y;
const NUMBER = /(?:0[xXbBoO][\w]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?)n?/y;
const STRING = /'(?:\\[^]|[^'\\\n])*'|"(?:\\[^]|[^"\\\n])*"/y;
const REGEXP = /\/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n[])+\/\w*/y;
const MARK =
  /\.\.\.|=>|\?\?=|\?\?|\?\.(?!\d)|>>>=|>>>|<<=|>>=|\*\*=|&&=|\|\|=|===|!==|==|!=|<=|>=|<<|>>|\+\+|--|&&|\|\||\*\*|[-+*/%&|^]=|[^]/y;
const ASSIGNS = new Set('= += -= *= /= %= **= <<= >>= >>>= &= |= ^= &&= ||= ??='.split(' '));
const BINARY = new Set('+ - * / % ** == != === !== < > <= >= << >> >>> & | ^ && || ?? instanceof'.split(' '));
const PREFIX = new Set('! ~ + - ++ -- typeof void delete await new'.split(' '));
const OF_MEMBERS = new Set('public private protected readonly override declare abstract static async get set accessor'.split(' '));
const OF_TYPES = new Set('public private protected readonly override declare abstract'.split(' '));

function withoutTypes(code) {
  let [end, token] = [0, null]; // where the last token ended; the current one: { kind, value, start, end, isFirst }
  let edits = []; // [start, end, text]
  const notArrows = new Set(); // places at which no arrow function begins

  // ------------------------------------------------------------------------------------------------------- tokens
  const match = (expression, at) => {
    expression.lastIndex = at;
    return expression.exec(code)?.[0] ?? '';
  };
  const read = (from, mayBeRegExp) => {
    const start = from + match(BLANK, from).length;
    const make = (kind, value) => ({ kind, value, start, end: start + value.length, isFirst: /\n/.test(code.slice(from, start)) });
    if (start >= code.length) return make('end', '');
    if (code[start] === '`') return make('template', '`');
    for (const [kind, expression] of [['number', NUMBER], ['word', WORD], ['string', STRING]]) {
      const value = match(expression, start);
      if (value) return make(kind, value);
    }
    const value = (mayBeRegExp && match(REGEXP, start)) || match(MARK, start);
    return make(value.length > 1 && value[0] === '/' && value !== '/=' ? 'regexp' : 'mark', value);
  };
  const next = (mayBeRegExp = false) => {
    const taken = token;
    end = taken?.end ?? 0;
    token = read(end, mayBeRegExp);
    return taken;
  };
  const peek = () => read(token.end, false);
  const is = (...values) => token.kind !== 'string' && token.kind !== 'template' && values.includes(token.value);
  const isWord = () => token.kind === 'word';
  const fail = () => {
    throw new SyntaxError(`it is not understood at ${token.start}`);
  };
  const expect = (value) => (is(value) ? next() : fail());
  const take = (value) => is(value) && Boolean(next());
  const blank = (from, to, text = '') => edits.push([from, to, text]);
  const blanked = (work) => {
    const from = token.start;
    work();
    blank(from, end);
  };
  const again = () => (token = read(end, true)); // where a value begins, a slash begins a regular expression
  const tried = (work) => {
    const before = [end, token, edits.length];
    try {
      if (work() !== false) return true;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    [end, token, edits.length] = before;
    return false;
  };
  // Take `<`, `>` and the like apart: `>>` ends two lists of types.
  const takeAngle = () => {
    if (token.kind !== 'mark' || token.value[0] !== '>') fail();
    end = token.start + 1;
    token = read(end, false);
  };
  const skipPair = () => {
    const close = { '(': ')', '[': ']', '{': '}' }[next().value];
    while (!is(close)) {
      if (token.kind === 'end') fail();
      if (is('(', '[', '{')) skipPair();
      else if (token.kind === 'template') template();
      else next();
    }
    next();
  };

  // -------------------------------------------------------------------------------------------------------- types
  const typeArguments = () => {
    expect('<');
    while (!token.value.startsWith('>')) {
      while (is('const', 'in', 'out') && /^[\w$]/.test(peek().value) && peek().value !== 'extends') next();
      type();
      if (take('=')) type();
      if (!take(',')) break;
    }
    takeAngle();
  };
  const type = () => {
    if (is('|', '&')) next();
    do simpleType();
    while (take('|') || take('&'));
    if (!token.isFirst && is('extends')) {
      next();
      type();
      if (!take('?')) return;
      type();
      expect(':');
      type();
    }
  };
  const simpleType = () => {
    if (is('keyof', 'unique', 'readonly', 'infer') && !/^[,;)>\]=|&}]/.test(peek().value)) {
      next();
      return simpleType();
    }
    if (is('asserts') && peek().kind === 'word' && !peek().isFirst) next();
    if (is('abstract') && peek().value === 'new') next();
    if (is('new')) next();
    if (is('<')) typeArguments();
    if (is('(')) {
      skipPair();
      if (take('=>')) return type();
    } else if (is('{', '[')) skipPair();
    else if (is('-')) next(), next();
    else if (token.kind === 'template') template();
    else if (is('typeof')) next(), simpleType();
    else if (token.kind === 'mark' || token.kind === 'end') fail();
    else {
      const isImport = next().value === 'import';
      if (isImport) skipPair();
      while (take('.')) next();
      if (is('<') && !token.isFirst) typeArguments();
    }
    while (is('[') && !token.isFirst) skipPair();
    if (is('is') && !token.isFirst) next(), type();
  };
  const annotation = () => is(':') && blanked(() => (next(), type()));

  // -------------------------------------------------------------------------------------------------- expressions
  const expression = (noIn) => {
    do {
      again();
      assignment(noIn);
    } while (take(','));
  };
  const assignment = (noIn, isBetween = false) => {
    again();
    if (arrow(isBetween)) return;
    if (take('yield')) {
      take('*');
      again();
      if (!token.isFirst && !is(')', ']', '}', ',', ';', ':') && token.kind !== 'end') assignment(noIn);
      return;
    }
    binary(noIn);
    if (is('?')) {
      next();
      assignment(false, true);
      expect(':');
      assignment(noIn);
    } else if (token.kind === 'mark' && ASSIGNS.has(token.value)) {
      next();
      assignment(noIn);
    }
  };
  const arrow = (isBetween) => {
    const place = `${token.start} ${isBetween}`;
    const isPossible = is('(', '<') || (isWord() && (is('async') || peek().value === '=>'));
    return isPossible && !notArrows.has(place) && (tried(() => {
      if (is('async') && !peek().isFirst && peek().value !== '=>') next();
      if (isWord()) next();
      else {
        if (is('<')) blanked(typeArguments);
        parameters();
        const isTyped = is(':');
        annotation();
        if (isBetween && isTyped) isBetween = 'typed';
      }
      if (token.isFirst || !is('=>')) return false;
      next();
      if (is('{')) block();
      else assignment();
      return isBetween !== 'typed' || is(':');
    }) || !notArrows.add(place)); // each is tried once: nested ones would take time exponential in their depth
  };
  const binary = (noIn) => {
    for (;;) {
      unary();
      while (is('as', 'satisfies') && !token.isFirst) {
        const from = token.start;
        next();
        if (is('const')) next();
        else type();
        blank(from, end);
      }
      if (!BINARY.has(token.value) && !(is('in') && !noIn)) return;
      if (token.kind !== 'mark' && token.kind !== 'word') return;
      next();
    }
  };
  const unary = () => {
    again();
    while (token.kind !== 'string' && token.kind !== 'template' && PREFIX.has(token.value)) {
      const word = next();
      if (word.value === 'new' && is('.')) return tail(); // new.target
      if (token.kind === 'mark' && is(',', ')', ';', '=')) return; // a name that is no operator here
      again();
    }
    if (is('<')) {
      blanked(typeArguments);
      return unary();
    }
    primary();
    tail();
  };
  const tail = () => {
    for (;;) {
      if (is('.', '?.')) {
        next();
        if (is('(', '[')) continue;
        if (is('<')) continue;
        if (token.kind === 'template') continue;
        next();
      } else if (is('(')) callArguments();
      else if (is('[')) {
        next();
        expression();
        expect(']');
      } else if (token.kind === 'template') template();
      else if (is('!') && !token.isFirst) blanked(next);
      else if (is('++', '--') && !token.isFirst) next();
      else if (is('<', '<<') && tried(() => (blanked(typeArguments), is('(') || token.kind === 'template'))) continue;
      else return;
    }
  };
  const callArguments = () => {
    expect('(');
    list(')');
  };
  const list = (close) => {
    for (again(); !is(close); again()) {
      if (take('...')) again();
      if (is(',')) next();
      else {
        assignment();
        if (!is(close)) expect(',');
      }
    }
    next();
  };
  // What stands in a template is code of its own.
  const template = () => {
    for (let at = token.start + 1; at < code.length; at++) {
      if (code[at] === '\\') at++;
      else if (code[at] === '`') {
        end = at + 1;
        token = read(end, false);
        return;
      } else if (code.startsWith('${', at)) {
        end = at + 2;
        expression();
        if (!is('}')) fail();
        at = token.start;
      }
    }
    fail();
  };
  const primary = () => {
    if (is('(')) {
      next();
      expression();
      return expect(')');
    }
    if (is('[')) {
      next();
      return list(']');
    }
    if (is('{')) return object();
    if (is('@')) return decorators(), primary();
    if (is('function') || (is('async') && peek().value === 'function' && !peek().isFirst)) return functionLike();
    if (is('class') || (is('abstract') && peek().value === 'class')) return classLike();
    if (token.kind === 'template') return template();
    if (token.kind === 'mark' || token.kind === 'end') fail();
    next();
  };
  const object = () => {
    expect('{');
    while (!is('}')) {
      if (take('...')) assignment();
      else {
        while (is('get', 'set', 'async', '*') && !/^[,:(=}<]/.test(peek().value)) next();
        take('*');
        key();
        if (is('(', '<')) method();
        else if (take(':') || take('=')) assignment();
      }
      if (!is('}')) expect(',');
    }
    next();
  };
  const key = () => {
    if (is('[')) {
      next();
      assignment();
      expect(']');
    } else next();
  };
  const decorators = () => {
    while (take('@')) {
      primary();
      tail();
    }
  };

  // --------------------------------------------------------------------------------------- functions and classes
  // Read parameters; return the names of those that are also properties.
  const parameters = () => {
    const names = [];
    expect('(');
    while (!is(')')) {
      decorators();
      if (is('this') && /^[:,)]/.test(peek().value)) {
        blanked(() => (next(), take(':') && type(), take(',')));
        continue;
      }
      const isProperty = is('public', 'private', 'protected', 'readonly', 'override') && /^[\w$[{]/.test(peek().value);
      while (isProperty && OF_TYPES.has(token.value) && /^[\w$[{]/.test(peek().value)) blanked(next);
      take('...');
      if (isProperty) names.push(token.value);
      binding();
      if (is('?')) blanked(next);
      annotation();
      if (take('=')) assignment();
      if (!is(')')) expect(',');
    }
    next();
    return names;
  };
  const binding = () => {
    const close = { '[': ']', '{': '}' }[token.value];
    if (close === undefined || token.kind !== 'mark') return isWord() ? next() : fail();
    next();
    while (!is(close)) {
      if (take(',')) continue;
      take('...');
      if (close === '}') {
        if (is('[') || peek().value === ':') {
          key();
          expect(':');
        }
      }
      binding();
      if (take('=')) assignment();
      if (!is(close)) expect(',');
    }
    next();
  };
  // Read what follows a function's name; return whether it has a body.
  const method = () => {
    if (is('<')) blanked(typeArguments);
    const names = parameters();
    annotation();
    if (!is('{')) return false;
    next();
    if (is('super')) statement(); // which comes before anything of `this`
    blank(end, end, names.map((name) => `; this.${name} = ${name};`).join(''));
    while (!is('}')) statement();
    next(true);
    return true;
  };
  const functionLike = () => {
    const from = token.start;
    take('async');
    expect('function');
    take('*');
    if (isWord() && !is('(')) next();
    if (!method()) {
      take(';');
      blank(from, end); // a signature alone
    }
  };
  const classLike = () => {
    if (is('abstract')) blanked(next);
    expect('class');
    if (isWord() && !is('extends', 'implements')) next();
    if (is('<')) blanked(typeArguments);
    if (take('extends')) {
      again();
      primary();
      tail();
      if (is('<')) blanked(typeArguments);
    }
    if (is('implements')) blanked(() => {
      do (next(), type());
      while (is(','));
    });
    expect('{');
    while (!is('}')) member();
    next();
  };
  const member = () => {
    if (take(';')) return;
    decorators();
    const from = token.start;
    let isAbsent = false;
    while (OF_MEMBERS.has(token.value) && !/^[(=;:?!<}]/.test(peek().value) && token.kind === 'word') {
      if (is('static') && peek().value === '{') return next(), block();
      isAbsent ||= is('abstract', 'declare');
      if (OF_TYPES.has(token.value)) blanked(next);
      else next();
    }
    if (is('[') && tried(() => (next(), isWord() && next() && is(':') && (next(), type(), expect(']'))))) {
      annotation();
      take(';');
      return blank(from, end);
    }
    take('*');
    key();
    if (is('?', '!')) blanked(next);
    if (is('(', '<')) isAbsent = !method() || isAbsent;
    else {
      annotation();
      if (take('=')) assignment();
    }
    take(';');
    if (isAbsent) blank(from, end);
  };

  // --------------------------------------------------------------------------------------------------- statements
  const block = () => {
    expect('{');
    while (!is('}')) statement();
    next(true);
  };
  const followsWord = () => peek().kind === 'word' && !peek().isFirst;
  const declaration = () => {
    do {
      next();
      binding();
      if (is('!')) blanked(next);
      annotation();
      if (take('=')) assignment(false);
    } while (is(','));
  };
  const loop = () => {
    next();
    take('await');
    expect('(');
    if (is('let', 'const', 'var')) {
      next();
      binding();
      annotation();
      if (take('=')) assignment(true);
      while (take(',')) {
        binding();
        annotation();
        if (take('=')) assignment(true);
      }
    } else if (!is(';')) expression(true);
    while (!is(')')) {
      if (is(';', 'in', 'of')) next();
      else expression();
    }
    next(true);
    statement();
  };
  const condition = () => {
    next();
    expect('(');
    expression();
    if (!is(')')) fail();
    next(true);
  };
  const enumeration = () => {
    const from = token.start;
    take('const');
    expect('enum');
    const name = next().value;
    expect('{');
    const lines = [];
    let last = '-1';
    while (!is('}')) {
      const label = token.kind === 'string' ? next().value : JSON.stringify(next().value);
      let value = `${last} + 1`;
      if (take('=')) {
        again();
        const start = token.start;
        assignment();
        value = code.slice(start, end);
      }
      last = `E[${label}]`;
      const own = /^"[A-Za-z_$][\w$]*"$/.test(label) ? `const ${label.slice(1, -1)} = ` : '';
      lines.push(`${own}E[${label}] = ${value}; if (typeof ${last} === 'number') E[${last}] = ${label};`);
      if (!is('}')) expect(',');
    }
    next(true);
    blank(from, end, `var ${name} = ((E) => { ${lines.join(' ')} return E; })({});`);
  };
  const imported = () => {
    const from = token.start;
    const isOfTypes = peek().value === 'type' && !/^import\s+type\s*(?:,|from\b)/.test(code.slice(from, from + 80));
    if (/^[.(]/.test(peek().value)) return expressionStatement();
    next();
    while (!token.isFirst || !isWord()) {
      if (is('{')) names();
      else if (token.kind === 'string' || is(';') || token.kind === 'end') break;
      else next();
    }
    if (token.kind === 'string') next(true);
    take(';');
    if (isOfTypes) blank(from, end);
  };
  const names = () => {
    expect('{');
    while (!is('}')) {
      if (is('type') && /^[\w$]/.test(peek().value) && peek().value !== 'as') blanked(() => {
        while (!is(',', '}')) next();
        take(',');
      });
      else next();
    }
    next();
  };
  const exported = () => {
    const isOfTypes = /^export\s+type\s*[{*]/.test(code.slice(token.start, token.start + 80));
    const after = isOfTypes ? '{' : peek().value;
    if (after === '*' || after === '{' || after === '=') return blanked(() => {
      next();
      take('type');
      if (is('{')) names();
      while (!token.isFirst && !is(';') && token.kind !== 'end') next(true);
    });
    blanked(next);
    if (!is('default')) return statement();
    blanked(next);
    again();
    if (is('function', 'class', 'async', 'abstract', 'interface') && peek().kind === 'word') return statement();
    blank(token.start, token.start, '(');
    assignment();
    blank(end, end, ')');
    take(';');
  };
  const signature = () => {
    if (is('interface', 'namespace', 'module', 'global')) {
      do next();
      while (!is('{', '<', 'extends') && token.kind !== 'end');
      if (is('<')) typeArguments();
      while (is('extends', ',')) next(), type();
      return skipPair(), again();
    }
    if (is('type')) {
      next();
      next();
      if (is('<')) typeArguments();
      expect('=');
      type();
      return take(';'), again();
    }
    const before = edits.length;
    statement();
    edits.length = before;
  };
  const expressionStatement = () => {
    expression();
    take(';');
    again();
  };
  const byWord = {
    if: () => (condition(), statement(), take('else') && (again(), statement())),
    while: () => (condition(), statement()),
    with: () => (condition(), statement()),
    for: loop,
    do: () => (next(true), statement(), is('while') && condition(), take(';')),
    switch: () => {
      condition();
      expect('{');
      while (!is('}')) {
        if (take('case')) expression(), expect(':');
        else if (take('default')) expect(':');
        else statement();
      }
      next(true);
    },
    try: () => {
      next();
      block();
      if (take('catch')) {
        if (take('(')) binding(), annotation(), expect(')');
        block();
      }
      if (take('finally')) block();
    },
    return: () => (next(true), token.isFirst || is(';', '}') || token.kind === 'end' ? take(';') : expressionStatement()),
    throw: () => (next(true), expressionStatement()),
    break: () => (next(), !token.isFirst && isWord() && next(), take(';'), again()),
    continue: () => (next(), !token.isFirst && isWord() && next(), take(';'), again()),
    function: functionLike,
    class: classLike,
    import: imported,
    export: exported,
    const: () => (peek().value === 'enum' ? enumeration() : (declaration(), take(';'), again())),
    var: () => (declaration(), take(';'), again()),
    let: () => (declaration(), take(';'), again()),
  };
  const statement = () => {
    again();
    if (is('{')) return block();
    if (take(';')) return;
    if (is('@')) return decorators(), statement();
    if (isWord()) {
      if (followsWord()) {
        if (is('interface', 'type') || (is('declare') && peek().value !== 'in')) {
          return blanked(() => (take('declare'), signature()));
        }
        if (is('enum')) return enumeration();
        if (is('abstract') && peek().value === 'class') return classLike();
        if (is('async') && peek().value === 'function') return functionLike();
      }
      if (peek().value === ':' && !is('default', 'case')) return next(), next(true), statement(); // a label
      if (Object.hasOwn(byWord, token.value)) return byWord[token.value]();
    }
    expressionStatement();
  };

  token = read(0, true);
  while (token.kind !== 'end') {
    const before = token.start;
    statement();
    if (token.start === before && token.kind !== 'end') fail();
  }
  return replaced(code, edits);
}

// Replace parts of code; what is longer than its replacement keeps its lines.
function replaced(code, edits) {
  let [at, written] = [0, ''];
  const ordered = edits.map((edit, index) => [...edit, index]).sort((a, b) => a[0] - b[0] || b[1] - a[1] || a[3] - b[3]);
  for (const [from, to, text] of ordered) {
    if (from < at) continue; // within one that is replaced as a whole
    written += code.slice(at, from) + text + code.slice(from, to).replace(/[^\n\r]/g, text ? '' : ' ');
    at = to;
  }
  return written + code.slice(at);
}
