// A live session of Java: `java --add-modules jdk.jshell session.java ANSWERS`, with the link as standard input.
//
// Theory of operation: the tool's own library evaluates a cell's snippets in this process, so what they declare stays.
// Frames are those of the other drivers: four bytes of length, most significant first, and a JSON object. Output goes to
// the standard streams, and is there before the answer. An interrupt stops the snippet that runs.

import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import jdk.jshell.*;

class Session {
    static final int MOST_TEXT = 60000;
    final DataInputStream link = new DataInputStream(new BufferedInputStream(System.in));
    final OutputStream answers;
    final JShell shell;
    final Map<String, String> before = new HashMap<>(); // properties of the last cell alone, as they were
    volatile boolean isStopped;

    Session(String answers) throws Exception {
        FileDescriptor pipe = new FileDescriptor(); // the file of a pipe may be another user's, so it is not opened anew
        java.lang.reflect.Field number = FileDescriptor.class.getDeclaredField("fd");
        number.setAccessible(true);
        number.setInt(pipe, Integer.parseInt(answers));
        this.answers = new FileOutputStream(pipe);
        System.setIn(InputStream.nullInputStream());
        System.getenv().forEach((name, value) -> System.getProperties().putIfAbsent(name, value));
        shell = JShell.builder().executionEngine("local").out(System.out).err(System.err).build();
        for (String name : List.of("java.io", "java.math", "java.net", "java.nio.file", "java.util",
                "java.util.concurrent", "java.util.function", "java.util.regex", "java.util.stream")) {
            shell.eval("import " + name + ".*;");
        }
    }

    public static void main(String[] words) throws Exception {
        Session session = new Session(words[0]);
        sun.misc.Signal.handle(new sun.misc.Signal("INT"), signal -> {
            session.isStopped = true;
            session.shell.stop();
        });
        session.send("{\"op\": \"ready\", \"runtime\": " + quoted("Java " + Runtime.version()) + "}");
        session.serve();
        System.exit(0);
    }

    void serve() throws IOException {
        while (true) {
            byte[] body;
            try {
                body = new byte[link.readInt()];
                link.readFully(body);
            } catch (EOFException ended) {
                return;
            }
            Map<?, ?> request = (Map<?, ?>) new Reader(new String(body, StandardCharsets.UTF_8)).value();
            if ("run".equals(request.get("op"))) send(answer(request));
        }
    }

    String answer(Map<?, ?> request) {
        String head = "{\"op\": \"done\", \"id\": " + request.get("id");
        isStopped = false;
        String end;
        try {
            surround(request);
            end = run((String) request.get("code"));
        } catch (Failure failure) {
            if (request.get("is_notebook") == null) System.err.println(failure.traceback);
            end = ", \"exit_code\": 1, \"error\": {\"name\": " + quoted(failure.name) + ", \"message\": "
                + quoted(failure.getMessage()) + ", \"traceback\": " + quoted(failure.traceback) + "}}";
        }
        System.out.flush();
        System.err.flush();
        return head + end;
    }

    /** Restore the properties of the last cell, and set those of this one alone. */
    void surround(Map<?, ?> request) throws Failure {
        before.forEach((name, value) -> {
            if (value == null) System.clearProperty(name);
            else System.setProperty(name, value);
        });
        before.clear();
        if (request.get("cwd") instanceof String cwd) {
            if (!new File(cwd).isDirectory()) throw new Failure("java.io.FileNotFoundException", cwd, "");
            System.setProperty("user.dir", cwd);
        }
        if (request.get("env") instanceof Map<?, ?> env) {
            env.forEach((name, value) -> before.put((String) name, System.setProperty((String) name, (String) value)));
        }
    }

    String run(String code) throws Failure {
        String value = null;
        String rest = code;
        while (!rest.isBlank()) {
            SourceCodeAnalysis.CompletionInfo info = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            String source = info.source() == null ? rest : info.source();
            value = null;
            for (SnippetEvent event : shell.eval(source)) {
                check(event);
                Snippet snippet = event.snippet();
                boolean isShown = event.causeSnippet() == null && snippet.kind() == Snippet.Kind.EXPRESSION
                    || snippet.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
                if (isShown && event.value() != null && !event.value().isEmpty()) value = event.value();
            }
            rest = info.source() == null ? "" : info.remaining();
        }
        if (value == null) return ", \"exit_code\": 0}";
        String text = quoted(value);
        return ", \"exit_code\": 0, \"value_repr\": " + text + ", \"data\": {\"text/plain\": " + text + "}}";
    }

    void check(SnippetEvent event) throws Failure {
        if (event.status() == Snippet.Status.REJECTED) {
            StringBuilder text = new StringBuilder();
            shell.diagnostics(event.snippet()).forEach(one -> text.append(one.getMessage(null)).append('\n'));
            throw new Failure("CompilationException", text.toString().strip(), event.snippet().source() + "\n" + text);
        }
        if (event.exception() instanceof EvalException error) throw new Failure(error);
        if (event.exception() != null) throw new Failure("UnresolvedReferenceException", event.exception().getMessage(), "");
        if (isStopped) throw new Failure("KeyboardInterrupt", "the cell was interrupted", "");
    }

    void send(String message) throws IOException {
        byte[] body = message.getBytes(StandardCharsets.UTF_8);
        ByteArrayOutputStream frame = new ByteArrayOutputStream();
        new DataOutputStream(frame).writeInt(body.length);
        frame.write(body);
        answers.write(frame.toByteArray());
        answers.flush();
    }

    static String quoted(String text) {
        StringBuilder written = new StringBuilder("\"");
        for (char one : (text == null ? "" : text.substring(0, Math.min(text.length(), MOST_TEXT))).toCharArray()) {
            if (one == '"' || one == '\\') written.append('\\').append(one);
            else if (one < ' ' || one > '~') written.append(String.format("\\u%04x", (int) one));
            else written.append(one);
        }
        return written.append('"').toString();
    }

    static class Failure extends Exception {
        final String name;
        final String traceback;

        Failure(String name, String message, String traceback) {
            super(message);
            this.name = name;
            this.traceback = traceback;
        }

        Failure(EvalException error) {
            this(error.getExceptionClassName(), error.getMessage(), traceOf(error));
        }

        static String traceOf(EvalException error) {
            StringBuilder text = new StringBuilder(error.getExceptionClassName() + ": " + error.getMessage());
            for (StackTraceElement frame : error.getStackTrace()) text.append("\n    at ").append(frame);
            return text.toString();
        }
    }

    /** Read the JSON of a request: objects, texts, numbers and words. */
    static class Reader {
        final String text;
        int at;

        Reader(String text) {
            this.text = text;
        }

        Object value() {
            skip();
            char first = text.charAt(at);
            if (first == '"') return string();
            if (first == '{') return object();
            int from = at;
            while (at < text.length() && ",}] \n".indexOf(text.charAt(at)) < 0) at++;
            String word = text.substring(from, at);
            return word.equals("null") ? null : word;
        }

        void skip() {
            while (" \n:,".indexOf(text.charAt(at)) >= 0) at++;
        }

        Map<String, Object> object() {
            Map<String, Object> members = new LinkedHashMap<>();
            at++;
            for (skip(); text.charAt(at) != '}'; skip()) {
                String name = string();
                members.put(name, value());
            }
            at++;
            return members;
        }

        String string() {
            StringBuilder read = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                char one = text.charAt(at);
                if (one == '\\') {
                    one = text.charAt(++at);
                    int place = "nrtbf".indexOf(one);
                    if (place >= 0) one = "\n\r\t\b\f".charAt(place);
                    else if (one == 'u') {
                        one = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
                        at += 4;
                    }
                }
                read.append(one);
            }
            at++;
            return read.toString();
        }
    }
}
